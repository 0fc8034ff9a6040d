"""Observers for single checks, in addition to those of all runs; see `prove.session`."""
