"""The end of a run: `finishing` after its last update, `closing` however it ended.

`closing` notes how the run ended and releases what it used. The other modules do parts of this.
"""
