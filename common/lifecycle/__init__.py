"""The stages of a run, which `common.run` calls: set-up, start, loop, evaluations, saves, end.

`stages` says what a run has at each stage. The package `start` has what comes directly before the
loop, and `end` what comes after it.
"""
