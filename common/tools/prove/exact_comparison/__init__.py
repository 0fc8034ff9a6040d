"""Compares a run with the reference run, bit for bit, and finds the causes of a difference.

The two runs have the same command, or one of them was interrupted and resumed. Such runs must give
the same records and results.
"""
