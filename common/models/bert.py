"""BERT checkpoints: from the Hub, from a folder, or a small one trained from scratch."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator

from common.agreement import ask_rank_zero
from common.console import quiet_transformers
from common.data.sources import hub_commit
from common.data.text import PAD_MULTIPLE, TextData, padded_length
from common.directory import model_folder
from common.errors import UserError
from common.files import reading

PUBLIC_CHECKPOINT = "google-bert/bert-base-uncased"
SMALL: dict[str, Any] = {  # the sizes of google/bert_uncased_L-2_H-128_A-2
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
}


def choose_checkpoint(config: Any, accelerator: Accelerator) -> str:
    """Resolve `--model`, or `--init-from`, on rank 0: a folder, a Hub id, or "scratch"."""

    def choose() -> str:
        name = find_checkpoint(config, accelerator.device.type != "cpu")
        check_checkpoint(name, config.max_length)
        return name

    return ask_rank_zero(choose)


def find_checkpoint(config: Any, is_accelerated: bool) -> str:
    """``auto`` is BERT-base with an accelerator and where it can be had, else a small BERT."""
    if config.init_from is not None:
        return str(model_folder(config.init_from).resolve())
    name: str = config.model
    if name == "auto":
        is_had = is_accelerated and hub_commit(PUBLIC_CHECKPOINT, "models")
        return PUBLIC_CHECKPOINT if is_had else "scratch"
    with reading(f"--model {name}"):
        if name != "scratch" and Path(name).is_dir():
            return str(Path(name).resolve())
    if name == "scratch" or hub_commit(name, "models"):
        return name
    why = "no such folder, it is not cached, and the Hub has no such model or does not answer"
    advice = "pass a local folder, or --model scratch to train a small one"
    raise UserError(f"--model {name} can't be had: {why}: {advice}")


def check_checkpoint(name: str, max_length: int) -> None:
    facts: dict[str, Any] = {"model_type": "bert", **SMALL}
    if name != "scratch":
        from transformers import BertConfig

        with reading(f"checkpoint {name}: its config.json"):
            found, _ = BertConfig.get_config_dict(name)
            facts = {**SMALL, "model_type": found["model_type"], **found}
    if (kind := facts["model_type"]) != "bert":
        raise UserError(f"checkpoint {name} is a {kind} model: this recipe trains BERT")
    length = padded_length(max_length)
    limits = {"max_position_embeddings": (length, 10**6), "num_hidden_layers": (1, 1000)}
    for field, (least, most) in limits.items():
        if not isinstance(value := facts[field], int) or not least <= value <= most:
            needs = f"{least} to {most:,} for --max-length {max_length}"
            padded = f"in batches padded to a multiple of {PAD_MULTIPLE}"
            raise UserError(f"checkpoint {name} has {field} {value!r}, and needs {needs}, {padded}")
    if Path(name).is_dir() and not any(Path(name).glob("*.safetensors")):
        why = "pickled ones are not loaded"
        raise UserError(f"checkpoint {name} has no weights in safetensors: {why}")


def load_pretrained(kind: str, name: Any, what: str, **others: Any) -> tuple[Any, dict[str, Any]]:
    """Load a model of Transformers, running no code of its own; return it, and what did not fit."""
    quiet_transformers()
    import transformers

    safely = {"trust_remote_code": False, "use_safetensors": True, "dtype": "float32"}
    with reading(what):
        return getattr(transformers, kind).from_pretrained(
            name, output_loading_info=True, **safely, **others
        )


def load_bert(name: str, data: TextData, dropout: float) -> Any:
    model, loaded = load_pretrained(
        *("BertForSequenceClassification", name, f"checkpoint {name}"),
        ignore_mismatched_sizes=True,  # the head's: it is for other classes
        **settings(data, dropout),
    )
    # What doesn't fit is drawn at random: as it should be of the head and the pooler.
    for key in [str(key) for keys in loaded.values() for key in keys]:
        if ".layer." in key or "_embeddings." in key:
            raise UserError(f"checkpoint {name}: its weights don't fit its config.json: {key}")
    here, there = data.vocabulary_size, model.config.vocab_size
    if here > there:
        sizes = f"its tokenizer has {here:,} tokens and its weights {there:,}"
        raise UserError(f"checkpoint {name}: {sizes}: they don't belong together")
    return model


def small_bert(name: str, data: TextData, dropout: float) -> Any:
    quiet_transformers()
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": data.vocabulary_size, **SMALL}
    return BertForSequenceClassification(BertConfig(**sizes, **settings(data, dropout)))


def settings(data: TextData, dropout: float) -> dict[str, Any]:
    return {
        "num_labels": len(data.class_names),
        "id2label": dict(enumerate(data.class_names)),
        "label2id": {name: index for index, name in enumerate(data.class_names)},
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "attn_implementation": "sdpa",  # the one that takes the batches' mask as it is
    }
