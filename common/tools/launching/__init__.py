"""Launches recipes in processes of their own, for the tools that train runs.

`command` builds the command line, `launched_run` follows a run by its files, `endings` describes
how a process ended, `folder` locks the folder of several runs, `stopping` ends the work on Ctrl-C,
and `validation_share` sets validation data aside.
"""
