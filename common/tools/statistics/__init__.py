"""Statistics for a few values of each group: means, intervals, and numbers of runs.

It knows neither runs nor metrics, and imports nothing else of the library.
"""
