"""What a peer does in a process of its own; started by `benchmarks.suites.processes`.

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
from typing import Any


class LazyImports(dict[str, Any]):
    """A recipe's global names: what it imports is imported when it is first used."""

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(__name__="model")
        self.sources: dict[str, tuple[str, str | None]] = {}
        for node in tree.body:
            if isinstance(node, ast.Import):
                self.sources |= {
                    alias.asname or alias.name: (alias.name, None) for alias in node.names
                }
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                self.sources |= {
                    alias.asname or alias.name: (module, alias.name) for alias in node.names
                }

    def __missing__(self, name: str) -> Any:
        module, attribute = self.sources[name]  # a KeyError sends Python on to its built-in names
        value = importlib.import_module(module)
        self[name] = getattr(value, attribute) if attribute else value
        return self[name]


def build(path: str, class_name: str, arguments: dict[str, Any]) -> Any:
    """Build a recipe's model from its classes, with only those imports that they need."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    names = LazyImports(tree)
    kinds = (ast.ClassDef, ast.FunctionDef)
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, kinds) and not (isinstance(node, ast.ClassDef) and node.decorator_list)
    ]
    # Annotations may name what the model does not need, so they are not looked up.
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, path, "exec", flags), names)
    return names[class_name](**arguments)


def update_once(model: Any, input_shape: list[int]) -> None:
    """Do one plain update on random numbers: what no training can do without."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.randn(input_shape))
    labels = torch.zeros(len(logits), dtype=torch.int64)
    torch.nn.functional.cross_entropy(logits, labels).backward()
    optimizer.step()


def train_textbook(arguments: dict[str, Any]) -> None:
    """Run a textbook loop on decoded arrays."""
    import torch

    from benchmarks.peer_loops import textbook

    arrays = textbook.ImageArrays.read(Path(arguments["folder"]))
    crop = arguments["crop_padding"]
    momentum: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    task = textbook.Task(
        lambda: build(arguments["path"], arguments["class"], arguments["arguments"]),
        lambda model: (
            torch.optim.SGD(model.parameters(), **momentum)
            if crop
            else torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
        ),
        textbook.TransformedImages(arrays, crop, flip=crop > 0),
        arguments["batch_size"],
        warmup_share=0.1,
    )
    train = {"pytorch": textbook.train_pytorch, "accelerate": textbook.train_accelerate}
    train[arguments["framework"]](task, arguments["precision"], arguments["steps"], 0)


def main(work: str, arguments: dict[str, Any]) -> None:
    """Do one kind of work, and say when it is done."""
    if work in ("build", "update"):
        importlib.import_module("torch")  # part of what is timed
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
        TrainerTask(**{**task, "folder": Path(task["folder"])}).train(arguments["steps"], 0)
        print("trained", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
    sys.stdin.read()  # stay, to be looked at, until whoever started this ends it
