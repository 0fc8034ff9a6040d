"""Launches recipes in processes of their own, for the tools that train runs.

`command` builds the command line, `launched_run` follows a run by its files, `output` reads how a
launch ended, `folder` locks the folder of several runs, and `stopping` ends the work on Ctrl-C.
"""
