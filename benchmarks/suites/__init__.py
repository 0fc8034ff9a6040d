"""The comparisons that `benchmarks/peers.py` runs, one module per recipe or purpose."""
