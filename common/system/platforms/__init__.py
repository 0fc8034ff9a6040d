"""What the operating system offers. Only this package knows which system it is."""
