"""Predictions: a model is used as trained, by code of its own recipe. Mistakes are sentences."""

from __future__ import annotations

import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from common.checkpoints.export import save_model
from common.checkpoints.tensors import read_tensors, write_tensors
from common.config import RequestedPrecision
from common.data.tokens import train_wordpiece
from common.errors import UserError
from common.system import devices
from common.tools.predict.command import main, use_device
from common.tools.predict.inputs import read_inputs
from common.tools.predict.predictor import Predictor
from common.tools.recipe import load_recipe
from common.training.out_of_memory import END_OTHER_PROGRAMS
from tests.damage import wrong
from tests.own_errors import require_no_own_class

RECIPE = '''
from common.config import TrainingConfig
from torch import nn

OBJECTIVE = "accuracy:max"
Config = TrainingConfig

class Own(nn.Module):
    """Brightness of the image against a threshold: of a copy of a recipe."""

    def __init__(self, features):
        super().__init__()
        self.head = nn.Linear(features, 2)

    def forward(self, x):
        return self.head(x.flatten(1))
'''
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
FACTS = {
    "recipe": "train",
    "class": "Own",
    "arguments": {"features": 12},
    "class_names": ["dark", "bright"],
    "channels": 3,
    "image_size": 2,
    "mean": [0.1, 0.2, 0.3],
    "std": [0.5, 0.25, 0.2],
}


pytestmark = pytest.mark.usefixtures("own_accelerator")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Return the path of a user's recipe."""
    path = tmp_path / "train.py"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def run(tmp_path: Path, recipe: Path) -> Path:
    """Return the directory of a finished run of that recipe."""
    torch.manual_seed(0)
    model = load_recipe(recipe).module.Own(12)
    save_model(tmp_path / "run" / "model", model, FACTS, card="", skeleton=None)
    return tmp_path / "run"


def image(tmp_path: Path, name: str, mode: str = "RGB", size: tuple[int, int] = (2, 2)) -> Path:
    """Write an image of random pixels."""
    random = np.random.default_rng(sum(map(ord, name)))
    pixels = Image.fromarray(random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    pixels.convert(mode).save(tmp_path / name)
    return tmp_path / name


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[Any]:
    """Return the objects that a command prints."""
    main([str(word) for word in arguments])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_predictions_equal_the_models_outputs(
    run: Path, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows are in the order of the files and hold probabilities, whatever the batch size."""
    files = [image(tmp_path, f"{number}.png") for number in range(5)]
    model = load_recipe(recipe).module.Own(12)
    model.load_state_dict(Predictor(run, recipe=recipe, mixed_precision="no").model.state_dict())
    mean, std = (np.array(FACTS[name]) for name in ("mean", "std"))
    pixels = np.stack([np.asarray(Image.open(file)) / 255 for file in files])
    inputs = torch.from_numpy((pixels - mean) / std).permute(0, 3, 1, 2).float()
    expected = model(inputs).softmax(-1).tolist()
    options = ("--recipe", recipe, "--mixed-precision", "no", "--batch-size")
    for folder, size in ((run, 64), (run / "model", 2)):
        rows = printed(capsys, folder, *files, *options, size)
        assert [row["file"] for row in rows] == [str(file) for file in files]
        for row, values in zip(rows, expected, strict=True):
            probabilities = [row["top"][name] for name in ("dark", "bright")]
            assert probabilities == pytest.approx(values, abs=1e-5)
            assert row["label"] == ["dark", "bright"][int(np.argmax(values))]
            assert row["probability"] == max(probabilities)
            assert [*row["top"].values()] == sorted(probabilities, reverse=True)


def test_images_of_any_size_and_mode_are_accepted(run: Path, recipe: Path, tmp_path: Path) -> None:
    """An image may be a file or an open image."""
    modes_and_sizes = [("L", (30, 20)), ("RGBA", (1, 9)), ("1", (2, 2))]
    files = [image(tmp_path, f"{mode}.png", mode, size) for mode, size in modes_and_sizes]
    probabilities = Predictor(run, recipe=recipe)([*files, Image.new("L", (3, 3))])
    assert probabilities.shape == (4, 2)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(4))


@pytest.fixture
def predicted(run: Path, recipe: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Return a function that runs the command with the model and returns its printed objects."""
    return lambda *words: printed(capsys, run, *words, "--recipe", recipe)


def test_paths_are_read_from_standard_input(
    predicted: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one path a line. `--top-k` limits the classes of a row."""
    file = image(tmp_path, "a.png")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{file}\n\n{file}\r\n"))
    rows = predicted("-", "--top-k", 1)
    assert rows == [{**rows[0], "top": {rows[0]["label"]: rows[0]["probability"]}}] * 2


def test_all_images_of_a_folder_are_read(predicted: Callable[..., Any], tmp_path: Path) -> None:
    """The images are sorted, with subfolders and links, and each row has the image's path."""
    folder = tmp_path / "photos"
    for place in ("", "b", "a/deep"):
        (folder / place).mkdir(parents=True, exist_ok=True)
        image(folder / place, "2.png")
        image(folder / place, "10.JPG")
        (folder / place / "notes.txt").write_text("no image")
    (tmp_path / "elsewhere").mkdir()
    image(tmp_path / "elsewhere", "linked.png")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "b" / "loop").symlink_to(folder)
    rows = predicted(folder)
    names = ["10.JPG", "2.png", "a/deep/10.JPG", "a/deep/2.png", "b/10.JPG", "b/2.png"]
    assert [row["file"] for row in rows] == [f"{folder}/{n}" for n in (*names, "link/linked.png")]


def test_texts_are_not_read_from_what_never_ends(tmp_path: Path) -> None:
    """A pipe without a writer, a device and a folder are refused."""
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "pipe", "a pipe"),
        ("/dev/zero", "a pipe"),
        (tmp_path, "folder"),
    ):
        with pytest.raises(UserError, match=message):
            [*read_inputs([str(path)], True)]


def test_only_newlines_end_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other characters at which `splitlines` splits belong to a text."""
    texts = [f"a{chr(number)}b" for number in (9, 11, 12, 28, 29, 30, 133, 8232, 8233)]
    (tmp_path / "lines.txt").write_text("\n\n".join(texts), encoding="utf-8-sig")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\r\n".join(texts)))
    assert [*read_inputs([str(tmp_path / "lines.txt")], True)] == texts
    assert [*read_inputs(["-"], True)] == texts


def test_text_model_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    """Transformers would draw the weight at random and only log a warning."""
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = train_wordpiece(["one two three"])
    sizes = dict.fromkeys(SIZES, 8)
    config = BertConfig(vocab_size=len(tokenizer), num_attention_heads=1, num_labels=2, **sizes)
    model = BertForSequenceClassification(config)
    folder = tmp_path / "run" / "model"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    facts = {"class_names": ["a", "b"], "text_columns": ["text"], "max_length": 8}
    save_model(folder, model, facts | {"files": tmp_path / "tokenizer"}, card="", skeleton=None)
    assert Predictor(folder)(["one", "two two"]).shape == (2, 2)
    weights = read_tensors(folder / "model.safetensors")
    del weights["bert.encoder.layer.0.output.dense.weight"]
    write_tensors(folder / "model.safetensors", weights)
    (folder / "model.json").write_text(json.dumps(facts))  # without a digest of the weights
    with pytest.raises(UserError, match=r"has no bert\.encoder\.layer\.0\.output\.dense\.weight"):
        Predictor(folder)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["dark"],
            r"1 class name, but .* for one input has the shape \(1, 2\) instead of \(1, 1\)",
        ),
        (["dark", "dark"], "class name 'dark' occurs twice"),
    ],
)
def test_class_names_must_fit_the_model(
    names: list[str], message: str, run: Path, recipe: Path
) -> None:
    """A made-up input shows it before the first prediction."""
    path = run / "model" / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "class_names": names}))
    with pytest.raises(UserError, match=message) as refused:
        Predictor(run, recipe=recipe)
    require_no_own_class(refused.value)


@pytest.mark.parametrize(
    ("precision", "advice"),
    [("no", "train it with a lower"), ("bf16", "pass --mixed-precision no")],
)
def test_outputs_that_are_not_finite_are_refused(
    run: Path, recipe: Path, precision: RequestedPrecision, advice: str
) -> None:
    """Outputs with NaN have no order, and JSON has no NaN. The advice depends on the precision."""
    predictor = Predictor(run, mixed_precision=precision, recipe=recipe)
    torch.nn.init.constant_(predictor.model.head.weight, 3e38)
    with pytest.raises(
        UserError, match=rf"some outputs of the model in .* are NaN or infinite: {advice}"
    ):
        predictor([Image.new("RGB", (2, 2), "white")])


@pytest.mark.parametrize(
    ("count", "device", "message"),
    [
        (
            3,
            "cpu",
            "2 inputs at once does not fit into memory: pass a --batch-size below 2",
        ),
        (
            1,
            "cpu",
            "the prediction of 1 input at once does not fit into memory: end other programs",
        ),
        (1, "cuda", f"{END_OTHER_PROGRAMS}, or pass --device cpu"),
    ],
)
def test_inputs_that_do_not_fit_into_memory(
    run: Path, recipe: Path, count: int, device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller batch size is advised only if it makes a smaller batch."""
    predictor = Predictor(run, batch_size=2, recipe=recipe)

    def run_out(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried")

    monkeypatch.setattr(predictor, "images", run_out)
    monkeypatch.setattr(predictor.accelerator.state, "device", torch.device(device))
    with pytest.raises(UserError) as refused:
        predictor([Image.new("RGB", (2, 2))] * count)
    assert message in refused.value.message


def test_benchmark_reports_consistent_figures(
    predicted: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Throughput agrees with the latency of batches."""
    monkeypatch.setattr("common.tools.predict.benchmark.MIN_SECONDS", 0.0)
    arguments = (image(tmp_path, "a.png"), "--batch-size", 8, "--benchmark", "--device", "cpu")
    (result,) = predicted(*arguments, "--mixed-precision", "no")
    assert 0 < result["p50_milliseconds"] <= result["p95_milliseconds"]
    assert result["batches"] >= 20
    assert result["samples_per_second"] > 8 / (result["p95_milliseconds"] / 1000) / 20
    assert (result["batch_size"], result["mixed_precision"]) == (8, "no")


def test_only_the_named_recipe_is_executed(run: Path, recipe: Path) -> None:
    """A foreign recipe must be passed as `--recipe`, and code in the run's folder is not run."""
    for place in (run, run / "model"):
        (place / "train.py").write_text("raise AssertionError('it was run')")
    with pytest.raises(
        UserError, match=r"recipe train, which is not .* recipes/: pass the path of that file, such"
    ):
        Predictor(run)
    for name in ("../../train", str(recipe.with_suffix("")), "", None):
        (run / "model" / "model.json").write_text(json.dumps(FACTS | {"recipe": name}))
        with pytest.raises(UserError, match="pass the path of that file, such as --recipe"):
            Predictor(run)
    for name in ("Config", "OBJECTIVE", "nn", "missing"):
        (run / "model" / "model.json").write_text(json.dumps(FACTS | {"class": name}))
        with pytest.raises(UserError, match="neither defines nor imports the model's class"):
            Predictor(run, recipe=recipe)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", "x.png"), "there is no folder nowhere"),
        (
            ("unfinished", "x.png"),
            "unfinished has no model yet, and its status is preempted: .*--resume",
        ),
        (
            ("refused", "x.png"),
            "refused has no model yet, and its status is failed: "
            r"correct what made its last command fail \(the loss is NaN\), and then continue it",
        ),
        (
            ("early", "x.png"),
            "early has no model yet, and its status is failed: "
            "repeat the command that started it, because it ended before",
        ),
        (
            ("run", "nothing"),
            "nothing and its subfolders contain no image files .*: pass image files",
        ),
        (("run", "pipe.png"), r"image pipe\.png can't be read .*a pipe or a device"),
        (("run", "/dev/zero"), r"image /dev/zero can't be read .*a pipe or a device"),
        (("empty", "x.png"), "no finished model .* in empty: "),
        (("run", "missing.png"), r"image missing\.png can't be read"),
        (("run", "train.py"), r"image train\.py can't be read"),
        (
            ("run", "train.py", "--batch-size", "0"),
            "--batch-size 0 is out of range: pass a number from 1 to 65536",
        ),
        (
            ("run", "train.py", "--batch-size", "9" * 30),
            "--batch-size 9+ is out of range: pass a number from 1 to 65536",
        ),
        (
            ("run", "train.py", "--top-k", "0"),
            "--top-k 0 is out of range: pass a number from 1 to 65536",
        ),
        (
            ("run", "train.py", "--device", "abacus"),
            "this machine has no device abacus: pass --device cpu",
        ),
        (("run", "train.py", "--device", "cpu:3"), "this machine has no device cpu:3"),
        (("run", ""), "nothing to predict"),
        (("run", "-"), "nothing to predict"),
        (("run", "train.py", "--recipe", "none.py"), r"there is no file none\.py"),
    ],
)
@pytest.mark.usefixtures("run")
def test_mistakes_are_sentences(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One sentence says what is wrong, and where."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    (tmp_path / "empty").mkdir()
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "status.json").write_text('{"status": "preempted"}')
    (tmp_path / "unfinished" / "config.json").write_text("{}")
    (tmp_path / "refused").mkdir()
    status = {"status": "failed", "resumable": False, "reason": "the loss is NaN"}
    (tmp_path / "refused" / "status.json").write_text(json.dumps(status))
    (tmp_path / "refused" / "config.json").write_text("{}")
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "status.json").write_text('{"status": "failed", "resumable": true}')
    (tmp_path / "nothing" / ".hidden").mkdir(parents=True)
    (tmp_path / "nothing" / "notes.txt").write_text("no image")
    (tmp_path / "nothing" / ".hidden" / "a.png").write_text("")
    os.mkfifo(tmp_path / "pipe.png")
    named = () if "--recipe" in arguments else ("--recipe", "train.py")
    with pytest.raises(UserError, match=message) as error:
        main([*arguments, *named])
    assert "\n" not in error.value.message


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff\xfe", b"{", b"{}"])
def test_damaged_facts_are_named(run: Path, recipe: Path, text: bytes) -> None:
    """The message has the path of `model.json`."""
    (run / "model" / "model.json").write_bytes(text)
    with pytest.raises(
        UserError,
        match=r"model\.json (can.t be read|is damaged or was)|takes classifiers",
    ):
        Predictor(run, recipe=recipe)


# One of the damaged files has a layer of 0 features, about which torch warns.
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_invalid_facts_of_a_model_give_one_sentence(run: Path, recipe: Path) -> None:
    """Each entry of `model.json` is damaged in turn: the model still works, or one sentence says
    why not.
    """
    ends = Counter[bool]()
    for description, facts in wrong(FACTS):
        (run / "model" / "model.json").write_text(json.dumps(facts))
        refused: UserError | None = None
        try:
            predictor = Predictor(run, recipe=recipe)
        except UserError as error:
            refused = error
        ends[refused is None] += 1
        if refused is None:
            probabilities = predictor([Image.new("RGB", (5, 5))])
            assert probabilities.shape == (1, 2), description
            assert probabilities.isfinite().all(), description
        else:
            require_no_own_class(refused)
            assert str(run) in refused.message or "train.py" in refused.message, description
            assert "\n" not in refused.message, description
    assert ends[True] > 10
    assert ends[False] > 10


def test_closed_standard_input_gives_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python sets `sys.stdin` to None then."""
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="standard input is closed: pass the names of files"):
        [*read_inputs(["-"], False)]


@pytest.mark.parametrize("before", [None, "true", "false"])
@pytest.mark.parametrize(("name", "asks_for_cpu"), [("cpu", True), ("mps", False)])
def test_device_flag_overrides_the_environment(
    name: str, asks_for_cpu: bool, before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--device cpu` wins over ACCELERATE_USE_CPU, and so does another device."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    if before is not None:
        monkeypatch.setenv("ACCELERATE_USE_CPU", before)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("mps"))
    use_device(name)
    assert devices.is_cpu_asked_for() == asks_for_cpu


def test_device_that_is_not_present_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may be built for GPUs on a machine without one, and the model would run on the CPU."""

    def built_for_gpus(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", built_for_gpus)
    with pytest.raises(UserError, match="this machine has no device cuda: pass --device cpu"):
        use_device("cuda")
