"""Which version of the data a run reads: local files, commits on the Hub, and fingerprints.

Fingerprints are digests that change with the data. By them, changed data are noticed.
"""
