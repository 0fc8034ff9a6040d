"""Measurements of a run: time, memory, energy, FLOPs, and sums of figures over ranks.

`common.track` writes and shows the figures. The reasons for a run's speed are in `common.profile`.
"""
