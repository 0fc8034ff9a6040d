"""The outputs of a run: its rows of metrics, trackers, media, model card, and printed reports.

The figures in them are computed in `common.measure` and by the recipe.
"""
