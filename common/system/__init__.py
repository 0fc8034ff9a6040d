"""The machine, system and device that a process runs on, and text that is safe to show."""
