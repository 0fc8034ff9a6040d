"""The machine, the operating system and the device that a process runs on."""
