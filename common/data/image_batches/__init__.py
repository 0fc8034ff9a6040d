"""Batches of images: how decoded images are augmented, scaled and put together."""
