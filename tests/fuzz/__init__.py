"""Tests with generated inputs and faults: odd flags, failing disks, damaged and edited files."""
