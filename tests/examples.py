"""The examples, which are edited copies of recipes: `EXAMPLES` says how each of them is tested."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.launch import REPOSITORY


@dataclass(frozen=True)
class Example:
    """An example and what is expected of it; `tests/runs/test_examples.py` checks this."""

    name: str  # of the file here, without .py
    origin: str  # the recipe that it was copied from
    flags: tuple[object, ...]  # of a run of some seconds, with several checkpoints in each epoch
    target: float  # the objective reaches it with these flags
    # The flags of a few updates that two processes make as one does; None if they can't be equal.
    same_on_two: tuple[object, ...] | None = ("--max-steps", 2, "--batch-size", 16)
    # Whether evaluations are equal, too. With batch norm they are not: its running statistics are
    # averaged over processes, but one process updates them in each micro-batch.
    evaluated_same_on_two: bool = True
    # The further flags of the one process. A loss that compares the samples of a batch with each
    # other needs a larger batch instead of accumulation.
    same_on_one: tuple[object, ...] = ("--gradient-accumulation-steps", 2)
    # Whether it is killed and resumed on two processes, too.
    is_killed_on_two: bool = False
    searched: str = "--learning-rate"
    space: str = "1e-4:1e-2:log"
    dataset: str | None = None  # the fixture that writes its data, unless they are built in
    most_lines: int = 210
    most_changed: int = 120  # lines that its origin does not have

    @property
    def path(self) -> Path:
        """The file."""
        return REPOSITORY / "examples" / f"{self.name}.py"


SECONDS = ("--batch-size", 64, "--checkpoint-every", 20)
EXAMPLES: tuple[Example, ...] = (
    Example(
        "regression",
        "mnist_mlp",
        (*SECONDS, "--epochs", 5, "--hidden-sizes", 128, 128, "--learning-rate", 1e-2),
        target=2.2,  # 5.0 by always predicting the mean, 1.0 at best
        searched="--weight-decay",
        space="0:0.1",
    ),
    Example(
        "multi_label",
        "mnist_mlp",
        (*SECONDS, "--epochs", 12, "--hidden-sizes", 128, 128, "--learning-rate", 3e-3),
        target=0.86,  # 0.61 by always saying yes
        searched="--weight-decay",
        space="0:0.1",
    ),
    Example(
        "denoiser",
        "resnet",
        ("--epochs", 4, "--checkpoint-every", 20),
        target=15.0,  # 10.5 with all the noise
        evaluated_same_on_two=False,
    ),
    Example(
        "character_model",
        "mnist_mlp",
        ("--checkpoint-every", 20, "--max-steps", 80, "--eval-every", 40, "--dropout", 0.1),
        target=10.0,  # 26 from the characters' frequencies alone
        same_on_two=("--max-steps", 2, "--batch-size", 16, "--dropout", 0),
        space="3e-3:3e-2:log",
    ),
    Example(
        "tagging",
        "mnist_mlp",
        ("--checkpoint-every", 20, "--max-steps", 80, "--eval-every", 40),
        target=0.5,  # 0 by calling each character a name
        same_on_two=("--max-steps", 2, "--batch-size", 16),
        space="1e-3:2e-2:log",
    ),
    Example(
        "own_dataset",
        "mnist_mlp",
        ("--epochs", 6, "--checkpoint-every", 5),
        target=0.85,  # 0.1 by guessing
    ),
    Example(
        "gan",
        "mnist_mlp",
        ("--dataset", "digits", "--epochs", 15, "--eval-every", 66, "--checkpoint-every", 10),
        target=30.0,  # 60 as it begins
        same_on_two=None,  # each process draws noise of its own
    ),
    Example(
        "dqn",
        "mnist_mlp",
        ("--checkpoint-every", 20, "--max-steps", 240, "--eval-every", 120, "--buffer-size", 4000),
        target=100.0,  # steps; 8 by always pushing to one side
        same_on_two=None,  # each process draws pushes of its own
        is_killed_on_two=True,
    ),
    Example(
        "averaged",
        "mnist_mlp",
        (
            *(*SECONDS, "--dataset", "digits", "--epochs", 30),
            *("--hidden-sizes", 128, 128, "--decay", 0.9, "--early-stopping", 2),
        ),
        target=0.9,
        same_on_two=("--max-steps", 2, "--batch-size", 16, "--mixup", 0),
    ),
    Example(
        "lora",
        "bert",
        (
            *("--model", "scratch", "--epochs", 8, "--batch-size", 16, "--checkpoint-every", 4),
            *("--learning-rate", "5e-3"),  # the default learns too little from so few samples
        ),
        target=0.85,  # 0.33 by guessing
        same_on_two=("--max-steps", 2, "--batch-size", 8, "--dropout", 0),
        searched="--weight-decay",
        dataset="odd_text",
    ),
    Example(
        "adversarial",
        "bert",
        (
            *("--model", "scratch", "--epochs", 8, "--batch-size", 16, "--checkpoint-every", 4),
            *("--learning-rate", "5e-3"),  # the default learns too little from so few samples
        ),
        target=0.85,  # 0.33 by guessing
        same_on_two=("--max-steps", 2, "--batch-size", 8, "--dropout", 0),
        searched="--distance",
        space="0.001:0.01:log",
        dataset="odd_text",
    ),
    Example(
        "causal_lm",
        "bert",
        ("--max-steps", 80, "--eval-every", 40, "--checkpoint-every", 20, "--max-length", 64),
        target=8.0,  # 257 by guessing
        same_on_two=("--max-steps", 2, "--batch-size", 8),
        space="1e-3:1e-2:log",
        most_lines=280,
        most_changed=200,
    ),
    Example(
        "two_heads",
        "mnist_mlp",
        (
            *(*SECONDS, "--dataset", "digits", "--epochs", 12),
            *("--hidden-sizes", 64, 64, "--learning-rate", 5e-3),
        ),
        target=0.9,  # 0.1 by guessing
        searched="--weight-decay",
        space="0:0.1",
        is_killed_on_two=True,
    ),
    Example(
        "contrastive",
        "mnist_mlp",
        ("--epochs", 12, "--checkpoint-every", 20),
        target=0.85,  # 0.1 by guessing
        same_on_two=("--max-steps", 2, "--batch-size", 16),
        same_on_one=("--batch-size", 32),
        is_killed_on_two=True,
    ),
    Example(
        "freezing",
        "mnist_mlp",
        (
            *(*SECONDS, "--dataset", "digits", "--epochs", 8),
            *("--hidden-sizes", 64, 64, "--learning-rate", 5e-3),
        ),
        target=0.9,  # 0.1 by guessing
        searched="--weight-decay",
        space="0:0.1",
        # An epoch of 8 updates, and one in which all layers learn.
        same_on_two=("--max-steps", 12, "--batch-size", 64, "--learning-rate", 1e-3),
        is_killed_on_two=True,
    ),
    Example(
        "distilled",
        "mnist_mlp",
        (*SECONDS, "--dataset", "digits", "--epochs", 12, "--learning-rate", 1e-2),
        target=0.9,  # 0.1 by guessing
        searched="--weight-decay",
        space="0:0.1",
    ),
)
