"""Reads data sets as a whole: from the Hub, from local files, or those that are built in."""
