"""Kills trainings of several frameworks at the same updates, resumes them, and counts samples."""
