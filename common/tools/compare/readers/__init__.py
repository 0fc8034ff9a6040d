"""Read runs: from their own directories, from W&B's offline folders, or from W&B's server."""
