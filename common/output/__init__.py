"""Standard output and error, and tables."""
