"""A run's directory: its files, their typed contents, and which run may use it."""
