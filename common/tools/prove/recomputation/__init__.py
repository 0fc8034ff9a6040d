"""Computes the figures that a recipe logs again, and explains wrong ones.

The figures of an evaluation follow from the outcomes of its samples. The training losses and
metrics follow from the calls of torch's loss functions. `margins` says how much an objective has to
improve, given the outcomes before and after training.
"""
