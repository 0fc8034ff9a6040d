"""The start of a run, before its loop: what it restores, and what `config.json` says of it.

`starting` has the steps. The other modules find parts of `config.json`.
"""
