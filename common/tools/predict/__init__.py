"""Use trained models: `load_model` in a program, `recipes predict` on the command line."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.tools.predict.loading import load_model

__all__ = ["load_model"]


def __getattr__(name: str) -> object:
    """Import `load_model` when a program first uses it, because `--help` should not load torch."""
    if name != "load_model":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from common.tools.predict.loading import load_model

    return load_model
