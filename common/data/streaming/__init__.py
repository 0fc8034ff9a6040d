"""Reads parquet files of any size while a run trains, for `--streaming`."""
