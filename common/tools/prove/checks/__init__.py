"""All checks, in the order in which they run and appear in the report."""

from common.tools.prove.bench import Check

CHECKS: tuple[Check, ...] = ()
