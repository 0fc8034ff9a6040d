"""The model of a run that only evaluates: its classes, and the data on which it was trained."""
