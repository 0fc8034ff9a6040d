"""The training loops that are killed: our recipe, and peers' loops after their documentation."""
