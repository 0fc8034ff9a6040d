"""Reads the command line, and finds flags that no code uses."""
