"""BERT checkpoints: from the Hub, from a folder, or a small one trained from scratch."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors import SafetensorError

from common.console import quiet_transformers
from common.data.sources import hub_commit
from common.data.text import TextData
from common.directory import model_folder
from common.errors import UserError, ask_rank_zero
from common.files import read_json

PUBLIC_CHECKPOINT = "google-bert/bert-base-uncased"


def choose_checkpoint(config: Any, accelerator: Accelerator) -> str:
    """Resolve `--model`, or `--init-from`: a folder, a Hub id, or "scratch"; rank 0 decides.

    ``auto`` is BERT-base with an accelerator and where it can be had, else a small BERT.
    """

    def choose() -> str:
        if config.init_from is not None:
            return str(model_folder(config.init_from).resolve())
        name: str = config.model
        if name == "auto":
            wanted = accelerator.device.type != "cpu" and hub_commit(PUBLIC_CHECKPOINT, "models")
            return PUBLIC_CHECKPOINT if wanted else "scratch"
        if name != "scratch" and Path(name).is_dir():
            check_folder(Path(name))
            return str(Path(name).resolve())
        if name == "scratch" or hub_commit(name, "models"):
            return name
        raise UserError(
            f"--model {name} can't be had: there is no such folder, it is not cached, and the Hub "
            "has no such model or does not answer. Pass a local folder, or --model scratch to "
            "train a small one"
        )

    return ask_rank_zero(choose)


def check_folder(folder: Path) -> None:
    try:
        kind = read_json(folder / "config.json").get("model_type")
    except UserError:
        raise UserError(f"--model {folder} holds no readable config.json of a model") from None
    if kind != "bert":
        raise UserError(f"--model {folder} is a {kind} model, and this recipe trains BERT")
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"--model {folder} has no weights in safetensors: pickled ones are not loaded"
        )


def load_bert(name: str, data: TextData, dropout: float) -> Any:
    quiet_transformers()
    from transformers import BertForSequenceClassification

    try:
        model = BertForSequenceClassification.from_pretrained(
            name,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            dtype="float32",
            **settings(data, dropout),
        )
    except (OSError, ValueError, SafetensorError) as problem:
        raise UserError(f"--model {name} can't be loaded: {str(problem).splitlines()[0]}") from None
    here, there = data.vocabulary_size, model.config.vocab_size
    if here > there:
        sizes = f"its tokenizer has {here:,} tokens and its weights {there:,}"
        raise UserError(f"--model {name}: {sizes}: they don't belong together")
    return model


def small_bert(name: str, data: TextData, dropout: float) -> Any:
    """Return a BERT of google/bert_uncased_L-2's size with random weights."""
    quiet_transformers()
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=data.vocabulary_size,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        **settings(data, dropout),
    )
    return BertForSequenceClassification(config)


def settings(data: TextData, dropout: float) -> dict[str, Any]:
    return {
        "num_labels": len(data.class_names),
        "id2label": dict(enumerate(data.class_names)),
        "label2id": {name: index for index, name in enumerate(data.class_names)},
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "attn_implementation": "sdpa",  # the one that takes the batches' mask as it is
    }
