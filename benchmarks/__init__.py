"""Scripts that measure the recipes, and what they share; `README.md` lists them."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
