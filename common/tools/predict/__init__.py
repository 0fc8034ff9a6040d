"""Use trained models: `load_model` in a program, or the command `predict`."""

from common.tools.predict.loading import load_model

__all__ = ["load_model"]
