"""All checks, in the order in which they run and appear in the report."""

from common.tools.prove.bench import Check
from common.tools.prove.checks import learning, repeating, resuming

CHECKS: tuple[Check, ...] = (
    learning.CHECK,
    repeating.CHECK,
    resuming.CHECK,
)
