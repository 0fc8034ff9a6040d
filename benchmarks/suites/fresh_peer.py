"""The work of a peer in a process of its own, which `benchmarks.suites.processes` starts.

python benchmarks/suites/fresh_peer.py WORK '{"arguments": "in JSON"}'

WORK is build, update, load, textbook or trainer.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


class LazyImports(dict[str, Any]):
    """A recipe's global names; each imported name is imported when it is first used."""

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(__name__="model")
        # Module and attribute by name; without an attribute, the name stands for the module.
        self.sources: dict[str, tuple[str, str | None]] = {}
        for node in tree.body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.sources[alias.asname or alias.name] = (alias.name, None)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.sources[alias.asname or alias.name] = (node.module or "", alias.name)

    def __missing__(self, name: str) -> Any:
        """Import a name; a KeyError makes Python look among its built-in names."""
        module, attribute = self.sources[name]
        value = importlib.import_module(module)
        self[name] = getattr(value, attribute) if attribute else value
        return self[name]


def build(path: str, class_name: str, arguments: dict[str, object]) -> nn.Module:
    """Build a recipe's model from its classes, with only those imports that they need.

    Args:
        path: of the recipe.
        class_name: of the model.
        arguments: of the class.
    """
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    names = LazyImports(tree)
    tree.body = [node for node in tree.body if is_needed(node)]
    # Annotations may have names that the model does not need, so they are not evaluated.
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, path, "exec", flags), names)
    return names[class_name](**arguments)


def is_needed(node: ast.stmt) -> bool:
    """Whether a statement of a recipe may be part of its model: functions and plain classes.

    The recipe's `Config` is a decorated class.
    """
    is_plain_class = isinstance(node, ast.ClassDef) and not node.decorator_list
    return is_plain_class or isinstance(node, ast.FunctionDef)


def update_once(model: nn.Module, input_shape: list[int]) -> None:
    """Do one plain update on random numbers: the least that any training does."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.randn(input_shape))
    labels = torch.zeros(len(logits), dtype=torch.int64)
    torch.nn.functional.cross_entropy(logits, labels).backward()
    optimizer.step()


def train_textbook(arguments: dict[str, Any]) -> None:
    """Run a textbook loop on decoded arrays: ResNet's if images are cropped, else the MLP's."""
    import torch

    from benchmarks.peer_loops import textbook

    arrays = textbook.ImageArrays.read(Path(arguments["folder"]))
    crop_padding = arguments["crop_padding"]

    def build_model() -> nn.Module:
        return build(arguments["path"], arguments["class"], arguments["arguments"])

    def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        if crop_padding:
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)

    task = textbook.Task(
        build_model,
        build_optimizer,
        textbook.TransformedImages(arrays, crop_padding, flip=crop_padding > 0),
        arguments["batch_size"],
        warmup_share=0.1,
    )
    train = {"pytorch": textbook.train_pytorch, "accelerate": textbook.train_accelerate}
    train[arguments["framework"]](task, arguments["precision"], arguments["updates"], 0)


def main(work: str, arguments: dict[str, Any]) -> None:
    """Do the work, and print a marker when it is done.

    Args:
        work: "build" a model, build it and "update" it once, "load" a checkpoint, train with a
            "textbook" loop, or train with HF "trainer".
    """
    if work in ("build", "update"):
        # The imports are part of the measured time.
        importlib.import_module("torch")
        importlib.import_module("accelerate")
        model = build(arguments["path"], arguments["class"], arguments["arguments"])
        if work == "update":
            update_once(model, arguments["input_shape"])
        print("built", flush=True)
    elif work == "load":
        importlib.import_module("torch")
        importlib.import_module("accelerate")
        from transformers import AutoModelForSequenceClassification

        AutoModelForSequenceClassification.from_pretrained(arguments["checkpoint"])
        print("built", flush=True)
    elif work == "textbook":
        train_textbook(arguments)
        print("trained", flush=True)
    elif work == "trainer":
        from benchmarks.peer_loops.hf_trainer import TrainerTask

        task = arguments["task"]
        TrainerTask(**{**task, "folder": Path(task["folder"])}).train(arguments["updates"], 0)
        print("trained", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
    sys.stdin.read()  # stay until the parent has measured this process and ends it
