"""Makes the built-in data sets, which need no download and no account."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import DatasetDict

# The classes of `docstrings`: topics of Python's standard library, and the modules and packages of
# each. Every CPython from 3.11 on has most of them, even a build without Tk, IDLE, tests or
# distutils. A module that is missing is left out.
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
SHORTEST = 20  # characters; shorter docstrings and paragraphs are left out


def digits() -> DatasetDict:
    """Return scikit-learn's 1,797 grey images of handwritten digits, 8×8 pixels.

    The test split has 20 % of the images, stratified by digit, and train has the others.
    """
    import numpy as np
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
    from PIL import Image as PillowImage
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    loaded = load_digits()
    labels = loaded.target.tolist()
    # Scikit-learn's pixels go from 0 to 16. Images of 8 bits go to 255.
    pixels = (loaded.images * (255 / 16)).round().astype(np.uint8)
    images = [PillowImage.fromarray(image) for image in pixels]
    columns = {"image": images, "label": labels}
    features = Features({"image": Image(), "label": ClassLabel(names=list("0123456789"))})
    whole = Dataset.from_dict(columns, features=features)
    train, test = train_test_split(
        range(len(whole)), test_size=0.2, random_state=0, stratify=labels
    )
    return DatasetDict(train=whole.select(train), test=whole.select(test))


def docstrings() -> DatasetDict:
    """Return paragraphs of the standard library's docstrings; the label is the module's topic.

    All paragraphs of a docstring are in the same split, and no paragraph is in two splits. Of the
    docstrings of each topic, 60 % are for training, 10 % for validation and 30 % for the test. The
    test split is this large so that the accuracies of two equally good models agree to about one
    percentage point.
    """
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
    from sklearn.model_selection import train_test_split

    paragraphs, topics = read_paragraphs(Path(sysconfig.get_path("stdlib")))
    # Split the numbers of the docstrings. `rest` is divided into train and validation below.
    rest, test = train_test_split(
        range(len(topics)), test_size=0.3, random_state=0, stratify=topics
    )
    rest_topics = [topics[number] for number in rest]
    # `rest` is 70 % of all docstrings, so a seventh of it is 10 % of all.
    train, validation = train_test_split(
        rest, test_size=1 / 7, random_state=0, stratify=rest_topics
    )
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(TOPICS))})
    splits = {}
    for name, docstring_numbers in (("train", train), ("validation", validation), ("test", test)):
        in_split = set(docstring_numbers)
        texts = []
        labels = []
        for text, docstring_number in paragraphs.items():
            if docstring_number in in_split:
                texts.append(text)
                labels.append(topics[docstring_number])
        splits[name] = Dataset.from_dict({"text": texts, "label": labels}, features=features)
    return DatasetDict(splits)


def read_paragraphs(library: Path) -> tuple[dict[str, int], list[int]]:
    """Read the docstrings of the modules in `TOPICS`, and cut them into paragraphs.

    A paragraph that occurs in several docstrings belongs to the first of them alone. Otherwise, the
    test split could have texts of the training split.

    Args:
        library: the folder of the standard library.

    Returns:
        First, the number of its docstring for each paragraph. Second, the topic of each docstring,
        by the docstring's number: an index into `TOPICS`.
    """
    paragraphs: dict[str, int] = {}
    topics: list[int] = []
    for number, (topic, docstring) in enumerate(topics_and_docstrings(library)):
        topics.append(topic)
        for paragraph in docstring.split("\n\n"):
            text = paragraph.strip()
            if len(text) >= SHORTEST:
                # A paragraph of an earlier docstring keeps that docstring's number.
                paragraphs.setdefault(text, number)
    return paragraphs, topics


def topics_and_docstrings(library: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of the modules in `TOPICS`, each after its index into `TOPICS`."""
    for topic, modules in enumerate(TOPICS.values()):
        for module in modules.split():
            for file in module_files(library, module):
                for docstring in docstrings_of(file):
                    yield topic, docstring


def module_files(library: Path, module: str) -> list[Path]:
    """Return the Python files of a module or package of the standard library.

    Files in folders named "test" are left out, because some builds of Python lack them. The list is
    empty if this Python does not have the module.

    Args:
        library: the folder of the standard library.
    """
    files = sorted((library / module).rglob("*.py"))
    if not files:
        files = [library / f"{module}.py"]
    return [
        file for file in files if file.exists() and "test" not in file.relative_to(library).parts
    ]


def docstrings_of(path: Path) -> Iterator[str]:
    """Yield the docstrings of a Python file that have at least `SHORTEST` characters."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, documented):
            text = ast.get_docstring(node)
            if text and len(text) >= SHORTEST:
                yield text


# The functions that make the built-in data sets, by name. "synthetic" is missing, because
# `common.data.images` makes it without `datasets`.
LOADERS: dict[str, Callable[[], DatasetDict]] = {"digits": digits, "docstrings": docstrings}
