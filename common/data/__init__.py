"""Data sets: how they are found, read, prepared and cached, and how their samples become batches.

Recipes import the modules at the top of this package. Their parts are in packages, of which each
says what it holds. The order of the samples is here, too. Models are in `common.models`.
"""
