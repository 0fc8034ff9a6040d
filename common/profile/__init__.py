"""`--profile`: times and traces a few updates, and says what bounds their speed.

The speed that every run logs is measured in `common.measure`.
"""
