"""`recipes compare`: reads finished or running runs, and sets them side by side.

It starts no run. Intervals and numbers of runs are computed in `common.tools.statistics`.
"""
