"""Data sets: how they are found, read, prepared and cached, and how their samples become batches.

The order of the samples is here, too. Models are in `common.models`.
"""
