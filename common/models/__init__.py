"""Models and layers that recipes share, and ways to compute any model with less time or memory.

A recipe defines its own model. Precision, DDP and FSDP2 are in `common.training`.
"""
