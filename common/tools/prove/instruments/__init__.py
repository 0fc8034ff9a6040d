"""Instruments: observers for single checks, in addition to `RunObserver`; see `prove.session`.

Three modules are no instruments: `holders` is a part of `memory`, and `host_storages` and
`wait_frames` are parts of `waits`.
"""
