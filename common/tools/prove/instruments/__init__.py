"""Instruments: observers for single checks, in addition to `RunObserver`; see `prove.session`.

Four modules are no instruments: `graphs` and `holders` are parts of `memory`, and `host_storages`
and `wait_frames` are parts of `waits`.
"""
