"""Observes a run in the process of the recipe.

The script `probe` runs the recipe. `RunObserver` wraps the methods of its run, and writes the
records that all observed runs have. The package `instruments` observes more, for single checks.
"""
