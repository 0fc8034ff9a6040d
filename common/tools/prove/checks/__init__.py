"""All checks, in the order in which they run and appear in the report."""

from common.tools.prove.checks import (
    accumulation,
    figures,
    learning,
    memory,
    processes,
    repeating,
    resuming,
    samples,
    waits,
)
from common.tools.prove.checks.base import Check

CHECKS: tuple[Check, ...] = (
    learning.CHECK,
    repeating.CHECK,
    resuming.CHECK,
    accumulation.CHECK,
    processes.CHECK,
    processes.SHARDED_CHECK,
    samples.CHECK,
    waits.CHECK,
    figures.CHECK,
    memory.CHECK,
)
