"""The training loops that are killed: our recipe, and loops from the peers' documentation."""
