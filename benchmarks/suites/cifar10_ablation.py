"""Write the plan of an ablation that removes the ideas of `recipes/cifar10_fast.py` in turn.

python benchmarks/suites/cifar10_ablation.py plan.json --dataset path/to/cifar10
python benchmarks/ablation.py plan.json --output results.json

A variant changes flags, or the text of a copy of the recipe. All figures are those of validation
data that are held out of train, so that no choice is made on test data. Two epochs take about four
minutes on two cores with bf16 arithmetic, and the rate falls to zero within them. Some ideas need
more epochs to pay: alternating flips are random ones in the first epoch.

With `--speedrun`, the variants are those of the speedrun: ten epochs with all training data. The
published runs of the speedrun are the baseline. The figures are those of test data, as there, and
describe what each idea brings. A run takes about ten minutes, so the default is one seed.

With `--speedrun --together`, there is one variant. It lacks all ideas whose effects are too small
to show alone. The default is three seeds.

Test-time augmentation is the exception: the recipe uses it for its last evaluation alone, so one
variant adds it to the evaluations on validation data.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Edits = dict[str, str]  # a text of the recipe, and the text in its place

AS_IT_IS = "as it is"
TOGETHER = "without five ideas"
WITH_VIEWS = "with test-time augmentation"
# airbench94 has this ratio of the biases' rate to that of other parameters.
BIAS_RATE_RATIO = 64
DEFAULT_BIAS_RATE = 26.0
# The middle one is about the rate of airbench94's SGD for batches of this size.
SGD_RATES = ("0.4", "0.8", "1.6")

WHITENING = "    model.whiten.weight.data = whitening_filters(images, kernel_size=2)\n"
FIXED_FIRST_LAYER = "        self.whiten.weight.requires_grad = False\n"
MATRICES = (
    '        {"params": [p for p in trained if p.ndim == 4], '
    '"orthogonal": True, "momentum": 0.6},\n'
)
# Muon needs a batch norm behind a filter, and the first layer has none.
MATRICES_AND_FIRST_LAYER = """\
        {
            "params": [p for p in trained if p.ndim == 4 and p.shape[-1] == 3],
            "orthogonal": True,
            "momentum": 0.6,
        },
        {"params": [p for p in trained if p.ndim == 4 and p.shape[-1] == 2]},
"""
MATRICES_BY_SGD = '        {"params": [p for p in trained if p.ndim == 4]},\n'
DIRAC = (
    "    nn.init.dirac_(convolution.weight[:in_channels])"
    "  # its first channels begin as the identity\n"
)
LAST_IMPORT = "from common.training.muon import Muon, MuonGroup\n"
RANDOM_FLIPS = """\
from common.data.image_batches import image_samples
from common.data.order import random_bits


def random_flips(seed: int, epoch: int, indices: torch.Tensor) -> torch.Tensor:
    return random_bits(seed, epoch, indices) >> 30


image_samples.alternating_bits = random_flips
"""
EVALUATION = "run.log(evaluate(run, model, validation_loader))"
EVALUATION_OF_VIEWS = (
    "run.log(evaluate(run, Views(accelerator.unwrap_model(model)), validation_loader))"
)

# By variant, the flags that it adds.
FLAGS: dict[str, list[str]] = {
    "no faster biases": ["--bias-rate", str(DEFAULT_BIAS_RATE / BIAS_RATE_RATIO)],
    "no label smoothing": ["--label-smoothing", "0"],
    **{f"SGD instead of Muon, rate {rate}": ["--learning-rate", rate] for rate in SGD_RATES},
}
# By variant, its edits.
EDITS: dict[str, Edits] = {
    "first layer random, not trained": {WHITENING: ""},
    "first layer random, trained": {
        WHITENING: "",
        FIXED_FIRST_LAYER: "",
        MATRICES: MATRICES_AND_FIRST_LAYER,
    },
    "no identity at the start": {DIRAC: ""},
    "random flips": {LAST_IMPORT: LAST_IMPORT + RANDOM_FLIPS},
    "no flips": {".flip = data.wants_flip(config.horizontal_flip)": ".flip = False"},
    "no shifts": {".max_shift = data.image_size // 16": ".max_shift = 0"},
    "ReLU instead of GELU": {"F.gelu(": "F.relu("},
    "batch norm's momentum 0.1": {"momentum=0.4)": "momentum=0.1)"},
    **{f"SGD instead of Muon, rate {rate}": {MATRICES: MATRICES_BY_SGD} for rate in SGD_RATES},
    WITH_VIEWS: {EVALUATION: EVALUATION_OF_VIEWS},
}
# In ten epochs, taking out one of them changed the accuracy by no more than chance does.
SMALL_IDEAS = (
    "no faster biases",
    "no label smoothing",
    "no identity at the start",
    "random flips",
    "batch norm's momentum 0.1",
)


def make_plan(
    dataset: str, epochs: int, validation_share: float, seeds: list[int]
) -> dict[str, Any]:
    """Return a plan for `benchmarks/ablation.py`.

    Raises:
        SystemExit: nothing would be held out of train, so there would be no figures to compare.
    """
    if not 0 < validation_share < 1:
        raise SystemExit(
            "error: the variants are compared on validation data: pass a --validation-share above 0"
        )
    names = dict.fromkeys([AS_IT_IS, *EDITS, *FLAGS])
    return {
        "recipe": "cifar10_fast",
        "flags": [
            *("--dataset", dataset),
            *("--validation-share", str(validation_share)),
            *("--epochs", str(epochs)),
        ],
        "seeds": seeds,
        "variants": {name: FLAGS.get(name, []) for name in names},
        "edits": EDITS,
    }


def make_speedrun_plan(dataset: str, seeds: list[int]) -> dict[str, Any]:
    """Return a plan that takes each idea out of the speedrun."""
    left_out = {WITH_VIEWS, *(f"SGD instead of Muon, rate {rate}" for rate in SGD_RATES[:-1])}
    names = [name for name in dict.fromkeys([AS_IT_IS, *FLAGS, *EDITS]) if name not in left_out]
    return {
        **speedrun_settings(dataset, seeds),
        "variants": {name: FLAGS.get(name, []) for name in names},
        "edits": {name: EDITS[name] for name in names if name in EDITS},
    }


def make_together_plan(dataset: str, seeds: list[int]) -> dict[str, Any]:
    """Return a plan that takes all small ideas out of the speedrun at once."""
    flags = [flag for idea in SMALL_IDEAS for flag in FLAGS.get(idea, [])]
    edits: Edits = {}
    for idea in SMALL_IDEAS:
        edits.update(EDITS.get(idea, {}))
    return {
        **speedrun_settings(dataset, seeds),
        "variants": {AS_IT_IS: [], TOGETHER: flags},
        "edits": {TOGETHER: edits},
    }


def speedrun_settings(dataset: str, seeds: list[int]) -> dict[str, Any]:
    """Return the part of a plan that all ablations of the speedrun share."""
    return {
        "recipe": "cifar10_fast",
        "figure": "test/accuracy_tta",
        "baseline": "benchmarks/results/cifar10_speedrun",
        "flags": ["--dataset", dataset, "--eval-every", "1000"],
        "seeds": seeds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path, help="JSON file to write")
    parser.add_argument("--dataset", default="cifar10", help="name, Hub id or local folder")
    parser.add_argument("--epochs", type=int, help="default: 2")
    parser.add_argument("--validation-share", type=float, help="default: 0.1")
    parser.add_argument(
        "--seeds", type=int, nargs="+", help="default: 0 1 2; --speedrun without --together: 0"
    )
    parser.add_argument("--speedrun", action="store_true", help="ten epochs, all training data")
    parser.add_argument(
        "--together",
        action="store_true",
        help="with --speedrun: take out at once the ideas that do not show alone",
    )
    arguments = parser.parse_args()
    has_plan_flags = arguments.epochs is not None or arguments.validation_share is not None
    if arguments.speedrun and has_plan_flags:
        parser.error(
            "--speedrun trains for ten epochs with all training data: leave out --epochs and "
            "--validation-share"
        )
    if arguments.together and not arguments.speedrun:
        parser.error("--together takes ideas out of the speedrun: add --speedrun")
    if arguments.together:
        plan = make_together_plan(arguments.dataset, arguments.seeds or [0, 1, 2])
    elif arguments.speedrun:
        plan = make_speedrun_plan(arguments.dataset, arguments.seeds or [0])
    else:
        plan = make_plan(
            arguments.dataset,
            2 if arguments.epochs is None else arguments.epochs,
            0.1 if arguments.validation_share is None else arguments.validation_share,
            arguments.seeds or [0, 1, 2],
        )
    arguments.plan.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    print(f"written: {arguments.plan}, {len(plan['variants'])} variants")


if __name__ == "__main__":
    main()
