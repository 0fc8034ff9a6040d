"""Data sets that every installation has: nothing to download, no account."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import DatasetDict

# Topics of the standard library, and the modules and packages of each: those that a CPython from
# 3.11 on has, also where Tk, IDLE, tests or distutils are left out. A version has most of them.
TOPICS = {
    "concurrency": "_threading_local asyncio concurrent contextvars multiprocessing queue sched "
    "selectors subprocess threading",
    "files": "_pyio bz2 filecmp fileinput fnmatch genericpath glob gzip lzma ntpath os pathlib "
    "posixpath shutil stat tarfile tempfile zipfile",
    "formats": "codecs configparser csv difflib encodings html json pickle pickletools plistlib re "
    "string textwrap xml",
    "internet": "email ftplib http imaplib ipaddress mailbox poplib quopri smtplib socket "
    "socketserver ssl urllib webbrowser wsgiref xmlrpc",
    "numbers": "_pydatetime _pydecimal _pylong calendar datetime fractions numbers random "
    "statistics",
    "testing": "bdb doctest pdb profile pstats timeit trace traceback unittest",
}
SHORTEST = 20  # characters of a paragraph that is taken


def digits() -> DatasetDict:
    """Return scikit-learn's 1,797 handwritten digits, 8×8 grey, a stratified 20 % as test."""
    import numpy as np
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
    from PIL import Image as PillowImage
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    loaded = load_digits()
    labels = loaded.target.tolist()
    pixels = (loaded.images * (255 / 16)).round().astype(np.uint8)
    columns = {"image": [*map(PillowImage.fromarray, pixels)], "label": labels}
    features = Features({"image": Image(), "label": ClassLabel(names=list("0123456789"))})
    whole = Dataset.from_dict(columns, features=features)
    train, test = train_test_split(
        range(len(whole)), test_size=0.2, random_state=0, stratify=labels
    )
    return DatasetDict(train=whole.select(train), test=whole.select(test))


def docstrings() -> DatasetDict:
    """Return paragraphs of the standard library's docstrings, by the topic of their module.

    Of each topic's docstrings 60 % are for training, 10 % for validation and 30 % for the test: so
    many that the accuracy of two runs, which err in different places, is the same to a point.
    """
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
    from sklearn.model_selection import train_test_split

    library = Path(sysconfig.get_path("stdlib"))
    found: dict[str, tuple[int, int]] = {}  # of each paragraph: its topic and its docstring
    topic_of: list[int] = []  # of each docstring
    for topic, modules in enumerate(TOPICS.values()):
        for file in (file for name in modules.split() for file in files_of(library, name)):
            for text in docstrings_of(file):
                for paragraph in map(str.strip, text.split("\n\n")):
                    if len(paragraph) >= SHORTEST:
                        found.setdefault(paragraph, (topic, len(topic_of)))
                topic_of.append(topic)
    rest, test = train_test_split(
        range(len(topic_of)), test_size=0.3, random_state=0, stratify=topic_of
    )
    train, validation = train_test_split(
        rest, test_size=1 / 7, random_state=0, stratify=[topic_of[row] for row in rest]
    )
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(TOPICS))})
    splits = {}
    for name, chosen in {"train": {*train}, "validation": {*validation}, "test": {*test}}.items():
        rows = [(text, topic) for text, (topic, source) in found.items() if source in chosen]
        texts, labels = zip(*rows, strict=True)
        splits[name] = Dataset.from_dict({"text": texts, "label": labels}, features=features)
    return DatasetDict(splits)


def files_of(library: Path, name: str) -> list[Path]:
    """Return the files of a module or package, without its tests; none where it is not there."""
    files = sorted((library / name).rglob("*.py")) or [library / f"{name}.py"]
    return [
        file for file in files if file.exists() and "test" not in file.relative_to(library).parts
    ]


def docstrings_of(path: Path) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_bytes())):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        if text and len(text) >= SHORTEST:
            yield text


LOADERS: dict[str, Callable[[], DatasetDict]] = {"digits": digits, "docstrings": docstrings}
