"""A simulated accelerator."""
