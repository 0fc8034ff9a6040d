"""Runs that make the same updates in different layouts, and their comparison within a tolerance.

A layout is the division of an update into micro-batches and processes. Sums in another order round
differently, so these runs agree only within a tolerance.
"""
