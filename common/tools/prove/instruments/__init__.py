"""Instruments: observers for single checks, in addition to `RunObserver`; see `prove.session`.

`holders` is no instrument. It is a part of `memory`.
"""
