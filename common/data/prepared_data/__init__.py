"""Prepared data, such as decoded images or tokenised text: their cache, and the samples to use."""
