"""Code in the pages for users: fences name their language, fragments parse, and commands exist."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tyro
from accelerate import Accelerator
from torch.nn import functional as F

from common.config import parse_config
from common.data.dataset import DatasetSamples
from common.data.loader import Loader
from common.data.order import TrainingOrder
from common.tools.__main__ import TOOLS
from common.tools.recipe import load_recipe
from tests.launch import REPOSITORY
from tests.page_blocks import names_of_block

DOCS = sorted((REPOSITORY / "docs").glob("*.md"))
PAGES = [REPOSITORY / "README.md", *DOCS, REPOSITORY / "examples" / "README.md"]
BENCHMARKS = sorted((REPOSITORY / "benchmarks").glob("*.md"))
# Another test runs the commands in the fences of the other pages.
PAGES_OF_MAINTAINERS = [
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "tests" / "README.md",
    *BENCHMARKS,
]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
# A command in the middle of a sentence, perhaps over two lines.
INLINE_COMMAND = re.compile(r"`((?:python|recipes)\s[^`]+)`")
# It stands for any script of the reader.
PLACEHOLDER = "script.py"
# Such as "`RunRecord` in `tools/compare/readers/run_record.py`", with a path in `common/`.
NAME_IN_FILE = re.compile(r"`([A-Za-z_]\w*)(?:\.\w+)*` in `([\w/]+\.py)`")

# Blocks of "py" are fragments. Those of "python" are whole programs, which a slow test also runs.
FRAGMENTS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"^```py(?:thon)?\n(.*?)^```$", page.read_text(), re.M | re.S)
    )
]


@pytest.mark.parametrize("block", FRAGMENTS)
def test_fragment_parses_and_its_imports_exist(block: str) -> None:
    """Readers copy these lines."""
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), alias.name


def test_table_of_numbers_is_read(tmp_path: Path) -> None:
    """Readers copy this `load_data`. Texts and dates are left out, and a missing cell stays NaN."""
    load_data = names_of_block("make-your-own.md", "pandas.read_csv")["load_data"]
    rows = [f"2026-01-{number + 1:02},Rome,{number},,{10 * number}" for number in range(20)]
    (tmp_path / "houses.csv").write_text("\n".join(["sold,city,area,rooms,price", *rows]) + "\n")
    config = argparse.Namespace(dataset=tmp_path / "houses.csv", target_column="price")
    data = load_data(config, None)
    assert {name: len(split) for name, split in data.splits.items()} == {
        "train": 16,
        "validation": 4,
    }
    area, rooms = data.splits["train"].tensors["inputs"].T
    assert (data.splits["train"].tensors["targets"] == 10 * area).all()
    assert (rooms != rooms).all()


@pytest.mark.parametrize("seed", range(5))
def test_loss_with_ignored_labels_does_not_depend_on_micro_batches(seed: int) -> None:
    """A sample counts as much whatever the others ignore, and as 0 if all its labels are."""
    loss_of = names_of_block("metrics.md", "def loss_of(")["loss_of"]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, 5, 3, generator=generator, requires_grad=True)
    labels = torch.randint(3, (8, 5), generator=generator)
    labels[torch.rand(8, 5, generator=generator) < 0.5] = -100
    labels[0] = -100
    loss = loss_of(logits, labels)
    parts = [loss_of(logits[half], labels[half]) for half in (slice(4), slice(4, None))]
    assert torch.stack(parts).mean().item() == pytest.approx(loss.item())
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.isfinite().all()
    assert not gradient[0].any()


@pytest.mark.parametrize("seed", range(5))
def test_labels_weigh_the_same_in_micro_batches_with_few_of_them(seed: int) -> None:
    """The mean of the micro-batches' losses is the loss of the batch, and each label counts."""
    loss_of = names_of_block("metrics.md", "def loss_over_labels(")["loss_over_labels"]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.zeros(8, 5, 3)
    labels = torch.randint(3, (8, 5), generator=generator)
    labels[torch.rand(8, 5, generator=generator) < 0.5] = -100
    per_sample = float((labels != -100).sum()) / len(labels)
    loss = loss_of(logits, labels, per_sample)
    assert loss.item() == pytest.approx(math.log(3))
    parts = [loss_of(logits[half], labels[half], per_sample) for half in (slice(4), slice(4, None))]
    assert torch.stack(parts).mean().item() == pytest.approx(loss.item())


def test_balanced_weights_do_not_depend_on_micro_batches() -> None:
    """Each class weighs the same in all, and micro-batches make the loss of the whole batch."""
    names = names_of_block("make-your-own.md", "def balanced_weights(")
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0] * 12 + [1] * 3 + [2])[torch.randperm(16, generator=generator)]
    weights = names["balanced_weights"](labels, 3)
    assert weights.tolist() == pytest.approx([16 / 36, 16 / 9, 16 / 3])
    inputs = torch.randn(16, 3, generator=generator)

    def loss_of(rows: slice, *further: Any) -> float:
        batch = {"inputs": inputs[rows], "labels": labels[rows]}
        return names["compute_loss"](torch.nn.Identity(), batch, *further)[0].item()

    halves = [loss_of(rows, weights) for rows in (slice(8), slice(8, None))]
    assert sum(halves) / 2 == pytest.approx(loss_of(slice(16), weights))
    assert loss_of(slice(16), weights) == pytest.approx(
        F.cross_entropy(inputs, labels, weight=weights).item()
    )
    assert loss_of(slice(16)) == pytest.approx(F.cross_entropy(inputs, labels).item())


@pytest.mark.parametrize("workers", [0, 1])
def test_oversampled_classes_are_equally_frequent_and_repeatable(workers: int) -> None:
    """Rows of 3 classes, of which one has 90 % of rows; an epoch's draws are always the same."""
    oversampled = names_of_block("make-your-own.md", "class Oversampled(")["Oversampled"]
    labels = torch.tensor([0] * 90 + [1] * 6 + [2] * 4)
    dataset = oversampled(torch.arange(100), labels, 600)

    def rows(epoch: int, workers: int) -> torch.Tensor:
        order = TrainingOrder(len(dataset), 30, 1, 1, 0, seed=3)
        samples = DatasetSamples(dataset)
        loader = Loader(samples, order, torch.device("cpu"), "workers", workers, seed=3)
        batches = [batch for batch, _ in loader.epoch(epoch)]
        loader.close()
        assert all((labels[batch["inputs"]] == batch["labels"]).all() for batch in batches)
        return torch.cat([batch["inputs"] for batch in batches])

    drawn = rows(0, workers)
    assert labels[drawn].bincount().tolist() == pytest.approx([200, 200, 200], abs=50)
    assert torch.equal(drawn, rows(0, 0))
    assert not torch.equal(drawn, rows(1, 0))


@pytest.mark.usefixtures("own_accelerator")
@pytest.mark.parametrize("seed", range(4))
def test_mean_iou_of_the_page_is_that_of_the_definition(seed: int) -> None:
    """It leaves out pixels of label 255, and classes that are nowhere; images count once."""
    names = names_of_block("metrics.md", '"mean_iou"')
    names["compute_loss"] = lambda model, batch: (torch.tensor(2.0), model(batch["logits"]))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 4, 6, 6, generator=generator)
    logits[:, 3] = -9  # not predicted, and not a label
    labels = torch.randint(3, (5, 6, 6), generator=generator).to(torch.uint8)
    labels[torch.rand(5, 6, 6, generator=generator) < 0.3] = 255
    labels[4] = 255  # an image without a label

    @contextmanager
    def evaluating(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        yield model

    run = SimpleNamespace(accelerator=Accelerator(cpu=True), evaluating=evaluating)
    parts = (slice(3), slice(3, 4), slice(4, 5))
    batches = [{"logits": logits[part], "labels": labels[part]} for part in parts]
    figures = names["evaluate"](run, torch.nn.Identity(), batches)

    kept = labels != 255
    predicted = logits.argmax(1)
    ious = [
        float((kept & (predicted == label) & (labels == label)).sum())
        / float((kept & ((predicted == label) | (labels == label))).sum())
        for label in range(3)
    ]
    assert figures["mean_iou"] == pytest.approx(sum(ious) / 3)
    hits = (predicted == labels)[kept].double().mean().item()
    assert figures["pixel_accuracy"] == pytest.approx(hits)
    assert (figures["count"], figures["loss"]) == (5, 2)


def languages(text: str) -> list[str]:
    """Return the language of each fenced block, empty where it names none."""
    return [language for language, _ in FENCE.findall(text)]


def test_names_on_the_map_of_the_code_are_in_their_files() -> None:
    """A reader finds in a file what the map promises."""
    pages = ("architecture.md", "where-to-change-what.md")
    text = "".join((REPOSITORY / "docs" / page).read_text() for page in pages)
    pairs = NAME_IN_FILE.findall(text)
    assert len(pairs) > 100
    for name, file in pairs:
        source = (REPOSITORY / "common" / file).read_text()
        assert re.search(rf"\b{name}\b", source), f"{name} is not in {file}"


@pytest.mark.parametrize("page", [*PAGES, *PAGES_OF_MAINTAINERS], ids=lambda page: page.stem)
def test_each_fence_names_its_language(page: Path) -> None:
    """Other tests choose the blocks that they run by language."""
    text = page.read_text()
    assert "" not in languages(text), f"{page.name} has a fence without a language"
    lines_of_fences = re.findall(r"^ *```", text, re.MULTILINE)
    assert len(lines_of_fences) == 2 * len(languages(text)), f"{page.name}: a fence is not closed"


def test_fence_without_a_language_is_seen() -> None:
    """The test above can fail."""
    assert languages("```bash\na\n```\n\n```\nb\n```\n\n  ```\n  c\n  ```\n") == ["bash", "", ""]


def inline_commands(text: str) -> list[str]:
    """Return the commands within sentences, each on one line."""
    return [" ".join(command.split()) for command in INLINE_COMMAND.findall(FENCE.sub("", text))]


def fenced_commands(text: str) -> list[str]:
    """Return the commands of Python and of `recipes` in fences, each on one line."""
    commands = []
    for language, block in FENCE.findall(text):
        if language == "bash":
            lines = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
            lines = [line.partition(" > ")[0] for line in lines]
            commands += [line for line in lines if line.startswith(("python benchm", "recipes "))]
    return commands


COMMANDS = {
    command
    for page in [*PAGES, *PAGES_OF_MAINTAINERS]
    for command in inline_commands(page.read_text())
}
COMMANDS |= {
    command for page in PAGES_OF_MAINTAINERS for command in fenced_commands(page.read_text())
}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_inline_command_is_accepted(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script, module or tool exists, and its parser takes the flags as written."""
    assert_accepted(shlex.split(command), monkeypatch)


@pytest.mark.parametrize(
    "command",
    [
        "recipes comprae",
        "recipes compare --plott picture.png",
        "python benchmarks/missing.py",
        "python benchmarks/speedrun.py --datasets cifar10",
        "python benchmarks/speedrun.py --dataset cifar10 --seeds one",
        "python benchmarks/scaling.py --outputs found",
        "python recipes/resnet.py --epoch 3",
        "python -m tests.missing",
        "python -m tests.generated --case 3",
    ],
)
def test_misspelt_inline_command_is_not_accepted(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail."""
    with pytest.raises((AssertionError, SystemExit)):
        assert_accepted(shlex.split(command), monkeypatch)


def assert_accepted(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a command names something that exists and takes these flags."""
    if words[0] == "recipes":
        assert_tool_takes(words[1], words[2:], monkeypatch)
    elif words[1] == "-m":
        assert_module_takes(words[2], words[3:], monkeypatch)
    elif words[1] != PLACEHOLDER:
        assert_script_takes(words[1], words[2:], monkeypatch)


def assert_tool_takes(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that `recipes` has a tool, which takes these words if there are any."""
    assert name in TOOLS, f"recipes has no command {name}"
    if words and words != ["train.py"]:  # a script that only the reader has
        # The others leave flags that they do not know to a recipe, and would go on.
        assert name in ("compare", "predict", "workspace"), "teach this test about this tool"
        main = import_module(TOOLS[name].module).main
        assert_parser_takes(lambda: main(words), monkeypatch)


def assert_module_takes(name: str, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a module exists, and takes these flags if there are any."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"there is no module {name}"
    if flags:
        is_package = spec.submodule_search_locations is not None
        module = import_module(f"{name}.__main__" if is_package else name)
        monkeypatch.setattr(sys, "argv", [name, *flags])
        if hasattr(module, "Options"):  # the script ends with main(tyro.cli(Options))
            tyro.cli(module.Options)
        else:
            assert_parser_takes(module.main, monkeypatch)


def assert_script_takes(path: str, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a script exists and takes these flags."""
    assert (REPOSITORY / path).is_file(), f"there is no {path}"
    folder, _, name = path.rpartition("/")
    if folder in ("recipes", "examples"):
        monkeypatch.setattr(sys, "argv", [path, *flags])
        parse_config(load_recipe(REPOSITORY / path).config_class)
    else:
        assert_module_takes(f"{folder.replace('/', '.')}.{Path(name).stem}", flags, monkeypatch)


def assert_parser_takes(main: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a program's parser accepts its command line, and end the program then."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_end(parser: argparse.ArgumentParser, words: Iterable[str] | None = None) -> None:
        parse(parser, None if words is None else [*words])
        raise SystemExit(0)  # as after --help

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0, "the parser refused a flag"
