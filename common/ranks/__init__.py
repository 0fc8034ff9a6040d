"""Agreement between the ranks of a run, and what a rank waits for before it exits."""
