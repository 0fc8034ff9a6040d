"""Use trained models: `load_model` in a program, `python -m common.predict` on the command line."""

from common.predict.loading import load_model

__all__ = ["load_model"]
