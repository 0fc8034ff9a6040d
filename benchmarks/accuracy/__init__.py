"""The parts of `time_to_accuracy.py`: goals, contestants, their runs, and the report."""
