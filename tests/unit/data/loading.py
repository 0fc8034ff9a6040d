"""Loading local data as the recipes do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.data.images import ImageData, load_images
from common.data.sources import find_named
from common.data.text import TextData, load_text
from common.errors import UserError
from tests.own_errors import require_no_own_class


def images(folder: Path, **changes: Any) -> ImageData:
    """Load a local folder of images as the recipes do."""
    arguments: dict[str, Any] = {
        "image_size": None,
        "image_column": None,
        "label_column": None,
        "dtype": torch.float32,
    }
    return load_images(find_named(str(folder), None), **(arguments | changes))


def text(folder: Path, **changes: Any) -> TextData:
    """Load a local folder of text as the recipes do."""
    arguments: dict[str, Any] = {
        "checkpoint": "scratch",
        "max_length": 32,
        "text_columns": (),
        "label_column": None,
    }
    return load_text(find_named(str(folder), None), **(arguments | changes))


def refusal(load: Callable[[], object]) -> str:
    """Return the one sentence with which loading is refused."""
    with pytest.raises(UserError) as error:
        load()
    message = error.value.message
    assert "\n" not in message
    assert len(message) < 600
    assert "Traceback" not in message
    require_no_own_class(error.value)
    return message
