"""The parts of `benchmarks/scaling.py`: runs, links, the model of an update's time, the report."""
