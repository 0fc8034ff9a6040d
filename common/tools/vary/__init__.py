"""`recipes vary`: trains all combinations of the values of some flags, and compares the variants.

It chooses no values. `common.tools.tune` searches for them.
"""
