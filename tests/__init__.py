"""Tests of the recipes as users run them, and of what they share."""
