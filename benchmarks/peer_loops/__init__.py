"""The training loops that the recipes are compared with."""
