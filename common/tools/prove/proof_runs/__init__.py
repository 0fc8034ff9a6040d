"""Launches the runs of a proof, and keeps their records for all checks.

`bench` is the interface of this package. Other packages ask the bench for runs, and it launches
each of them once. Runs in different layouts are in the package `layouts`.
"""
