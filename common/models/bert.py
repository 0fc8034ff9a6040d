"""BERT models for classification: from the Hub, from a folder, or a small one from scratch."""

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypedDict

from accelerate import Accelerator

from common.data.text import PAD_MULTIPLE, TextData, padded_length
from common.data.versions.hub_commits import hub_commit
from common.errors import UserError
from common.failures.sentences import reading
from common.ranks.agreement import ask_rank_zero
from common.run_directory.finished_model import model_folder

if TYPE_CHECKING:
    from transformers import BertForSequenceClassification, PreTrainedModel

# The weights that did not fit the model, by reason, such as "missing_keys": their names, or their
# names with shapes.
LoadingInfo = Mapping[str, Collection[object]]
PRETRAINED_ADVICE = (
    "use a folder with a complete model, or for a model of the Hub, check its id and the connection"
)
PUBLIC_CHECKPOINT = "google-bert/bert-base-uncased"
# The sizes of google/bert_uncased_L-2_H-128_A-2.
SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
}


class CheckpointFlags(Protocol):
    """The flags of a recipe that choose and limit a BERT."""

    init_from: str | None
    model: str
    max_length: int


class BertSettings(TypedDict):
    """The options of a BERT's configuration that depend on the data and the flags."""

    num_labels: int
    id2label: dict[int, str]
    label2id: dict[str, int]
    hidden_dropout_prob: float
    attention_probs_dropout_prob: float
    attn_implementation: str


def choose_checkpoint(config: CheckpointFlags, accelerator: Accelerator) -> str:
    """Return the checkpoint that `--model` or `--init-from` means, the same on all ranks.

    Returns:
        A folder, the id of a model of the Hub, or "scratch".

    Raises:
        UserError: on all ranks. The checkpoint can't be found, or this recipe can't train it.
    """

    def choose() -> str:
        name = find_checkpoint(config, accelerator.device.type != "cpu")
        check_checkpoint(name, config.max_length)
        return name

    return ask_rank_zero(choose)


def find_checkpoint(config: CheckpointFlags, is_accelerated: bool) -> str:
    """Find the checkpoint that the flags mean; see `choose_checkpoint`.

    ``auto`` is BERT-base if there is an accelerator and the Hub or its cache has the model.
    Otherwise ``auto`` is a small BERT.
    """
    if config.init_from is not None:
        return str(model_folder(config.init_from).resolve())
    name = config.model
    if name == "auto":
        is_available = is_accelerated and hub_commit(PUBLIC_CHECKPOINT, "models")
        return PUBLIC_CHECKPOINT if is_available else "scratch"
    with reading(f"--model {name}", "pass a local folder, or a Hub id"):
        if name != "scratch" and Path(name).is_dir():
            return str(Path(name).resolve())
    if name == "scratch" or hub_commit(name, "models"):
        return name
    reason = (
        "there is no such folder, it is not cached, and the Hub has no such model or does not "
        "answer"
    )
    advice = (
        "check the id, the connection and HF_TOKEN; or start a new run with a local folder, or "
        "with --model scratch to train a small model"
    )
    raise UserError(f"--model {name} can't be loaded, because {reason}", advice=advice)


def check_checkpoint(name: str, max_length: int) -> None:
    """Raise a `UserError` if this recipe can't train a checkpoint.

    A checkpoint must be a BERT with enough positions for `max_length`. If it is a folder, it must
    have its weights as safetensors.
    """
    facts = facts_of_checkpoint(name)
    model_type = facts["model_type"]
    if model_type != "bert":
        raise UserError(
            f"checkpoint {name} has the model type {model_type}, but this recipe trains BERT",
            advice="pass a BERT model, such as --model bert-base-uncased",
        )
    check_sizes(name, facts, max_length)
    if Path(name).is_dir() and not any(Path(name).glob("*.safetensors")):
        advice = "save the model again with model.save_pretrained(FOLDER), or pass another one"
        raise UserError(
            f"checkpoint {name} has no weights as safetensors, and pickled weights are not loaded",
            advice=advice,
        )


def facts_of_checkpoint(name: str) -> Mapping[str, object]:
    """Return the configuration of a checkpoint, with the sizes of `SMALL` where it states none.

    Transformers replaces missing sizes by its defaults. For a check, `SMALL` is as good: it has the
    same number of positions, and a plausible number of layers.

    Raises:
        UserError: the checkpoint has no readable `config.json`.
    """
    if name == "scratch":
        return {"model_type": "bert", **SMALL}
    from transformers import BertConfig

    with reading(f"the config.json of checkpoint {name}", PRETRAINED_ADVICE):
        saved_config, _ = BertConfig.get_config_dict(name)
        # A config.json without `model_type` gives a KeyError, which `reading` reports.
        model_type = saved_config["model_type"]
    return {**SMALL, **saved_config, "model_type": model_type}


def check_sizes(name: str, facts: Mapping[str, object], max_length: int) -> None:
    """Raise a `UserError` if a checkpoint has too few positions, or an implausible size."""
    length = padded_length(max_length)
    # No real BERT is above the upper limits, so a larger number shows a damaged config.json.
    limits = {"max_position_embeddings": (length, 10**6), "num_hidden_layers": (1, 1000)}
    for field, (least, most) in limits.items():
        value = facts[field]
        if not isinstance(value, int) or not least <= value <= most:
            needs = f"{least} to {most:,}"
            advice = "pass another model"
            if field == "max_position_embeddings":
                needs += (
                    f" for --max-length {max_length}, in batches padded to a multiple of "
                    f"{PAD_MULTIPLE}"
                )
                advice += ", or a smaller --max-length"
            raise UserError(
                f"checkpoint {name} has {field} {value!r}, but the recipe needs {needs}",
                advice=advice,
            )


def load_pretrained(
    class_name: str, name: str | Path, subject: str, **options: object
) -> tuple["PreTrainedModel", LoadingInfo]:
    """Load a model of Transformers, without running code or unpickling files of its repository.

    Args:
        class_name: the name of the model's class in `transformers`.
        name: a folder or the id of a model of the Hub.
        subject: what is loaded, the first words of an error message.
        options: further arguments of `from_pretrained`.

    Returns:
        The model in fp32, and the names of the weights that did not fit, by reason.

    Raises:
        UserError: the model can't be loaded.
    """
    quiet_transformers()
    import transformers

    with reading(subject, PRETRAINED_ADVICE):
        model_class = getattr(transformers, class_name)
        return model_class.from_pretrained(
            name,
            output_loading_info=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype="float32",
            **options,
        )


def load_bert(name: str, data: TextData, dropout: float) -> "BertForSequenceClassification":
    """Return a BERT with the weights of a checkpoint, and a head for the data's classes.

    The head has random values, unless the checkpoint has a head for as many classes.

    Raises:
        UserError: the weights can't be loaded, or do not fit their own configuration or tokenizer.
    """
    model, loading_info = load_pretrained(
        "BertForSequenceClassification",
        name,
        f"checkpoint {name}",
        ignore_mismatched_sizes=True,  # the checkpoint's head may be for other classes
        **bert_settings(data, dropout),
    )
    # Transformers puts random values instead of weights that are missing or don't fit. Only the
    # head and the pooler may have such values.
    for keys in loading_info.values():
        for key in map(str, keys):
            if ".layer." in key or "_embeddings." in key:
                raise UserError(
                    f"the weights of checkpoint {name} don't fit its config.json (such as {key})",
                    advice="copy or download the model again, or pass another model",
                )
    tokenizer_size = data.vocabulary_size
    weights_size = model.config.vocab_size
    if tokenizer_size > weights_size:
        advice = "use the tokenizer and the weights of one checkpoint, or pass another model"
        raise UserError(
            f"checkpoint {name} has a tokenizer with {tokenizer_size:,} tokens, but its embedding "
            f"has only {weights_size:,} rows",
            advice=advice,
        )
    return model


def small_bert(data: TextData, dropout: float) -> "BertForSequenceClassification":
    """Return a small BERT with random weights."""
    quiet_transformers()
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": data.vocabulary_size, **SMALL}
    return BertForSequenceClassification(BertConfig(**sizes, **bert_settings(data, dropout)))


def bert_settings(data: TextData, dropout: float) -> BertSettings:
    """Return the options that pretrained and small BERTs have in common."""
    return {
        "num_labels": len(data.class_names),
        "id2label": dict(enumerate(data.class_names)),
        "label2id": {name: index for index, name in enumerate(data.class_names)},
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "attn_implementation": "sdpa",  # SDPA takes the batches' mask as it is
    }


def quiet_transformers() -> None:
    """Have Transformers show only errors, and no progress bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    # Recipes call the deprecated method, because all releases of version 5 have it. Version 6
    # removes it.
    warnings.filterwarnings("ignore", message="`gradient_checkpointing_enable` is deprecated")
    logging.disable_progress_bar()
