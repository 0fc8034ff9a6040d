"""What all benchmarks share: isolation, clocks, rounds, judging and results."""
