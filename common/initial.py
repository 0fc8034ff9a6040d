"""What `--init-from` names: a run, a folder or file of weights, or a model of the Hub."""

import functools
import os
import re
from pathlib import Path
from typing import Any

from common.agreement import ask_rank_zero
from common.directory import FACTS, WEIGHTS, insist_on_written_weights, model_folder
from common.files import read_json_if_there, reading

PUBLISHED = "config.json"  # beside weights that timm publishes
MOST_PIXELS = 65536  # of a side


@functools.cache
def find_initial(asked: str) -> str:
    """Return a folder or file on this machine; rank 0 fetches a model of the Hub, for all."""

    def find() -> str:
        is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", asked) and not os.path.isdir(Path(asked).parent)
        if os.path.exists(asked) or not is_id:
            return asked
        from huggingface_hub import snapshot_download

        what = f"--init-from {asked} is neither a file nor a folder here, and as a model of the Hub"
        advice = "pass a finished run, a folder or file of weights, or the id of a model"
        with reading(f"{what} it", advice):
            return snapshot_download(asked, allow_patterns=[WEIGHTS, PUBLISHED])

    return ask_rank_zero(find)


def weights_file(path: str | Path) -> Path:
    """Return the safetensors file of a run, of a model's folder, or that is itself named.

    A `UserError` says that there is none, or that a run's weights are not those that it wrote.
    """
    place = Path(find_initial(str(path)))
    if os.path.isfile(place):
        if place.name == WEIGHTS and os.path.isfile(place.with_name(FACTS)):
            insist_on_written_weights(place.parent)
        return place
    if {PUBLISHED, WEIGHTS} <= {*(os.listdir(place) if os.path.isdir(place) else ())}:
        return place / WEIGHTS
    return model_folder(path) / WEIGHTS


def initial_facts(path: str | None) -> dict[str, Any]:
    """Return what is known of how weights were trained: mean, std, channels, class_names …"""
    if path is None or os.path.isfile(path):
        return {}
    folder = weights_file(path).parent
    if (own := read_json_if_there(folder / FACTS)) is not None:
        return own
    published = read_json_if_there(folder / PUBLISHED) or {}
    settings = published.get("pretrained_cfg", published)
    with reading(str(folder / PUBLISHED), "pass the safetensors file alone"):
        channels, size, _ = settings["input_size"]
        if not 1 <= size <= MOST_PIXELS:
            raise ValueError(f"images of {size} pixels")
        facts = {name: [*map(float, settings[name])] for name in ("mean", "std")}
        return {**facts, "channels": int(channels), "published_size": int(size)}


def initial_shapes(path: str | None) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight by name; nothing where no weights are named."""
    from safetensors import safe_open

    if path is None:
        return {}
    file = weights_file(path)
    with reading(str(file)), safe_open(file, framework="pt") as weights:
        return {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
