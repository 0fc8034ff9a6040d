"""Data sets that every installation has: nothing to download, no account."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import DatasetDict

# Packages and large modules that every CPython from 3.11 on has, also where Tk or IDLE is left out.
PACKAGES = {
    "asyncio": "asyncio",
    "decimal": "_pydecimal.py",
    "email": "email",
    "http": "http",
    "importlib": "importlib",
    "ipaddress": "ipaddress.py",
    "logging": "logging",
    "mailbox": "mailbox.py",
    "unittest": "unittest",
    "xml": "xml",
}


def digits() -> DatasetDict:
    """Return scikit-learn's 1,797 handwritten digits, 8×8 grey, a stratified 20 % as test."""
    import numpy as np
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
    from PIL import Image as PillowImage
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    loaded = load_digits()
    pixels = (loaded.images * (255 / 16)).round().astype(np.uint8)
    rows = train_test_split(
        np.arange(len(pixels)), test_size=0.2, random_state=0, stratify=loaded.target
    )
    features = Features({"image": Image(), "label": ClassLabel(names=list("0123456789"))})
    return DatasetDict(
        {
            name: Dataset.from_dict(
                {
                    "image": [PillowImage.fromarray(pixels[row]) for row in chosen],
                    "label": loaded.target[chosen].tolist(),
                },
                features=features,
            )
            for name, chosen in zip(("train", "test"), rows, strict=True)
        }
    )


def docstrings() -> DatasetDict:
    """Return the standard library's docstrings, labelled with the package they come from."""
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

    library = Path(sysconfig.get_path("stdlib"))
    names = list(PACKAGES)
    package_of: dict[str, str] = {}
    for name, place in PACKAGES.items():
        path = library / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for text in docstrings_of(file):
                package_of.setdefault(text, name)
    features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
    columns = {
        "text": list(package_of),
        "label": [names.index(name) for name in package_of.values()],
    }
    return DatasetDict({"train": Dataset.from_dict(columns, features=features)})


def docstrings_of(path: Path, shortest: int = 20) -> Iterator[str]:
    """Yield the docstrings in one file that have at least `shortest` characters."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, documented):
            text = ast.get_docstring(node)
            if text and len(text) >= shortest:
                yield text


LOADERS: dict[str, Callable[[], DatasetDict]] = {"digits": digits, "docstrings": docstrings}
