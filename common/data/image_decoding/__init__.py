"""Decodes the images of a data set to pixels of one size, and chooses their format."""
