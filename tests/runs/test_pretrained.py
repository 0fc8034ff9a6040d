"""Fine-tuning a local BERT checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.launch import Runner
from tests.local_data import write_tiny_bert


def test_local_checkpoint_is_fine_tuned(runner: Runner, odd_text: Path, tmp_path: Path) -> None:
    """`--model FOLDER` starts from its weights and its vocabulary; the head is new."""
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    checkpoint = write_tiny_bert(tmp_path / "tiny-bert")
    run = runner.run(
        *("bert", "--dataset", odd_text, "--model", checkpoint, "--max-steps", 1),
        *("--learning-rate", 0, "--tracker", "none"),
        launcher="fork",
    )
    before = load_file(checkpoint / "model.safetensors")
    after = run.weights()
    shared = [name for name in before if f"bert.{name}" in after]
    assert len(shared) >= 20
    for name in shared:
        assert torch.equal(before[name], after[f"bert.{name}"]), name
    assert after["classifier.weight"].shape == (3, 32)
    assert run.config["config"]["model"] == str(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(run.directory / "model")
    expected = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.get_vocab() == expected.get_vocab()
