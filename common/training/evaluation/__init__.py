"""What evaluations need and decide: the state around one, its rehearsal, the best, early stopping.

`common.lifecycle.evaluations` uses these modules at each evaluation of a run.
"""
