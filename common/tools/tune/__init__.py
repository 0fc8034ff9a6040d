"""`recipes tune`: searches for good values of flags with Optuna. Each trial is a normal run.

Runs of chosen combinations of values, over several seeds, are those of `common.tools.vary`.
"""
