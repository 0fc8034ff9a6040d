"""`--auto-batch-size`: which sizes it tries and chooses, and which losses it refuses."""
