"""Observers for single checks, in addition to `RunObserver`; see `prove.session`."""
