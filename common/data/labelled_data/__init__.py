"""What all data sets for classification share: splits, and columns of labels and texts.

It does not matter whether a data set is read as a whole (`reading`) or streamed (`streaming`).
"""
