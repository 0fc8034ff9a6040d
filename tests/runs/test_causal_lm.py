"""The example for causal language models: from a checkpoint, on a file of pairs."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from common.data.tokens import byte_tokenizer
from examples.causal_lm import small_llama
from tests.examples import EXAMPLES
from tests.launch import Finished, Runner

(EXAMPLE,) = [example for example in EXAMPLES if example.name == "causal_lm"]
LONGEST = 40  # tokens of a pair, of which each is a byte


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2, which has neither a token for padding nor one for the beginning of a text."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-gpt2"
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=32,
        n_layer=1,
        n_head=2,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 100 pairs, of which 10 are too long; texts are not only ASCII."""
    generator = random.Random(0)
    lines = []
    for number in range(100):
        size = 60 if number % 10 == 0 else generator.randint(1, 12)
        prompt = "".join(generator.choice("abcdé") for _ in range(size))
        lines.append(json.dumps({"prompt": prompt, "completion": prompt[::-1][:5], "id": number}))
    path = tmp_path_factory.mktemp("pairs") / "reversed.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def trained(runner: Runner, checkpoint: Path, pairs: Path, *flags: object) -> Finished:
    """Return a run of the example on the pairs, from the checkpoint."""
    return runner.run(
        *(EXAMPLE.path, "--model", checkpoint, "--dataset", pairs, "--max-length", LONGEST),
        *("--tracker", "none", "--mixed-precision", "no", *flags),
        launcher="fork",
    )


def test_checkpoint_is_fine_tuned_and_exported_for_transformers(
    runner: Runner, checkpoint: Path, pairs: Path
) -> None:
    """Transformers loads the export, and has its figures pair by pair, without padding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = trained(runner, checkpoint, pairs, "--max-steps", 8, "--batch-size", 8)
    assert "left out 10 pairs" in run.output
    assert run.config["data"]["sizes"] == {"train": 82, "validation": 4, "test": 4}
    model = AutoModelForCausalLM.from_pretrained(run.directory / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(run.directory / "model")
    losses = []
    for pair in pairs_of_test(pairs):
        prompt = tokenizer(pair["prompt"]).input_ids
        completion = [*tokenizer(pair["completion"]).input_ids, tokenizer.eos_token_id]
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        losses.append(F.cross_entropy(logits, torch.tensor(completion), reduction="none").detach())
    loss = float(torch.cat(losses).mean())
    assert run.summary["test/loss"] == pytest.approx(loss, rel=1e-5)
    assert run.summary["test/perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def pairs_of_test(path: Path) -> list[dict[str, str]]:
    """Return the pairs of the test split."""
    pairs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    tokens = [len((pair["prompt"] + pair["completion"]).encode()) + 1 for pair in pairs]
    short = [pair for pair, count in zip(pairs, tokens, strict=True) if count <= LONGEST]
    random.Random(0).shuffle(short)
    return short[len(short) // 20 : 2 * (len(short) // 20)]


def test_small_model_stops_at_the_end_of_a_completion() -> None:
    """The configuration of the model and its tokenizer name the same token."""
    tokenizer = byte_tokenizer()
    assert small_llama(tokenizer).generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.slow
def test_completions_of_any_length_accumulate_exactly(
    runner: Runner, checkpoint: Path, pairs: Path
) -> None:
    """Micro-batches with different numbers of tokens make the update of the whole batch."""
    flags = ("--max-steps", 4, "--log-every", 1)
    whole = trained(runner, checkpoint, pairs, *flags, "--batch-size", 16)
    parts = trained(
        *(runner, checkpoint, pairs, *flags),
        *("--batch-size", 4, "--gradient-accumulation-steps", 4),
    )
    for name in ("train/loss", "train/grad_norm"):
        assert parts.series(name) == pytest.approx(whole.series(name), rel=1e-4), name


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ('{"prompt": "a"}', "'completion'"),
        ("[1, 2]", "TypeError"),
        ('{"prompt": "a", ', "JSONDecodeError"),
    ],
)
def test_mistake_in_the_file_is_one_sentence(
    line: str, cause: str, runner: Runner, tmp_path: Path
) -> None:
    """The sentence names the file, the cause, and what a line must have."""
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' + line)
    run = runner.run(
        *(EXAMPLE.path, "--dataset", path, "--tracker", "none"), succeeds=False, launcher="fork"
    )
    assert run.returncode == 1
    assert "Traceback" not in run.printed()
    for words in (f"--dataset {path} can't be read", cause, '"completion"'):
        assert words in run.printed()
