"""Runs made to meet what no test lists one by one: failing disks, edited files."""
