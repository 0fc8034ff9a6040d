"""Writes a finished model to a folder."""

import contextlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from common.checkpoints.copies import copied
from common.checkpoints.model_weights import weights_of
from common.checkpoints.pack import Tensors
from common.checkpoints.shards import is_sharded
from common.checkpoints.tensors import write_in_turn, write_tensors
from common.failures.sentences import writing
from common.run_directory.finished_model import WEIGHTS
from common.run_directory.model_records import WeightsDigest
from common.run_directory.records import MODEL_JSON
from common.storage.digests import sha256_of_file
from common.storage.files import replacing, write_text
from common.storage.json_files import write_json
from common.system.launch_variables import is_main_rank


def save_model(
    folder: Path,
    model: nn.Module,
    facts: Mapping[str, object],
    card: str,
    skeleton: nn.Module | None,
) -> None:
    """Write a finished model's folder: weights, facts and card, completely or not at all.

    A Transformers model is written so that `from_pretrained` reads the folder. Only rank 0 may call
    this function, unless the model is sharded: see `skeleton`.

    Args:
        facts: the contents of `model.json`, by which the model is built and used: constructor
            arguments, class names, normalisation, image size. An entry ``files`` is not written
            there: it is the path of a folder whose files are copied beside the weights, or None.
        card: the text of `README.md`; without a text, there is no such file.
        skeleton: the same model on the meta device, without values, if the model is sharded; None
            otherwise. All ranks must call this function for a sharded model, and rank 0 writes one
            tensor at a time.

    Raises:
        UserError: the folder can't be written.
    """
    weights = weights_of(model)
    if skeleton is not None and not is_main_rank():
        take_part_in_gathering(weights)
        return
    with writing(str(folder)), replacing(folder) as unfinished:
        files = facts.get("files")
        if files is not None:
            shutil.copytree(str(files), unfinished, dirs_exist_ok=True)
        if skeleton is None:
            write_whole_model(unfinished, model, weights)
        else:
            write_sharded_model(unfinished, skeleton, weights)
        model_facts = {name: facts[name] for name in facts if name != "files"}
        model_facts |= digest_of_weights_file(unfinished / WEIGHTS).to_json()
        write_json(unfinished / MODEL_JSON, model_facts)
        if card:
            write_text(unfinished / "README.md", card)


def write_whole_model(folder: Path, model: nn.Module, weights: Tensors) -> None:
    """Write the weights of a model that is not sharded; also a Transformers model's other files."""
    save_pretrained = getattr(model, "save_pretrained", None)
    if save_pretrained is not None:
        with without_progress_bar():
            save_pretrained(folder)
    else:
        write_tensors(folder / WEIGHTS, copied(weights))


def write_sharded_model(folder: Path, skeleton: nn.Module, weights: Tensors) -> None:
    """Write the weights of a sharded model on rank 0, and a Transformers model's other files."""
    save_pretrained = getattr(skeleton, "save_pretrained", None)
    if save_pretrained is not None:
        with without_progress_bar():
            save_pretrained(folder, state_dict={})  # the files besides the weights
    write_sharded_weights(folder / WEIGHTS, weights)


@contextlib.contextmanager
def without_progress_bar() -> Iterator[None]:
    """Have Transformers show no progress bar in the block, because a run has its own display."""
    if "transformers" not in sys.modules:  # the model is of another library
        yield
        return
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def digest_of_weights_file(path: Path) -> WeightsDigest:
    """Return the digest of a file of weights, as `model.json` records it.

    Before weights are loaded, `require_written_weights` in `common.run_directory.finished_model`
    compares the digest with the file, and refuses a file that has changed.

    Raises:
        OSError: the file can't be read.
    """
    return WeightsDigest(weights_sha256=sha256_of_file(path))


def whole_tensors(weights: Tensors) -> Iterator[torch.Tensor]:
    """Yield each tensor whole, on the CPU; all ranks must iterate together if any is sharded."""
    for value in weights.values():
        yield value.full_tensor().cpu() if is_sharded(value) else value.cpu()


def take_part_in_gathering(weights: Tensors) -> None:
    """Take this rank's part in `whole_tensors` on rank 0, without keeping the tensors.

    Gathering a sharded tensor is a collective operation, in which all ranks must take part.
    """
    for _ in whole_tensors(weights):
        pass


def write_sharded_weights(path: Path, weights: Tensors) -> None:
    """Write the weights of a sharded model on rank 0, one whole tensor at a time."""
    tensors = whole_tensors(weights)
    try:
        write_in_turn(path, weights, tensors)
    finally:
        # After an error, go through the remaining tensors: the other ranks wait for rank 0 at each.
        for _ in tensors:
            pass
