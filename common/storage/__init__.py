"""Files that are complete or absent, JSON, and digests."""
