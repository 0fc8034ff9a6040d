"""The targets of the search: each draws an input, and must succeed or end with one sentence.

A target takes Hypothesis's `data`, from which it draws, and a folder of its own. It works in the
test's process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from common.checkpoints.adapters import RandomState
from common.checkpoints.export import save_model
from common.checkpoints.model_weights import load_weights
from common.checkpoints.newest import restore_newest
from common.checkpoints.state import Parts
from common.config import parse_config
from common.data.image_decoding.preparation import ImageFacts
from common.data.images import ImageData, format_of_batches, load_images
from common.data.sources import find_named
from common.data.text import TextData, load_text
from common.errors import UserError
from common.metric_names import STEP
from common.run_directory.directory import RunDirectory
from common.run_directory.identity import signed_config
from common.run_directory.init_from import initial_facts
from common.run_directory.records import RunConfig, RunIdentity
from common.run_directory.taking import MAX_TIMEOUT, take_run_directory
from common.storage.digests import signed
from common.tools.compare.command import main as compare
from common.tools.recipe import load_recipe
from common.tools.tune.space import parse_space
from common.track.log import Log
from tests import local_data
from tests.fuzz import inputs
from tests.launch import RECIPES, REPOSITORY
from tests.own_errors import require_no_own_class
from tests.unit.checkpoint_store import checkpoints_in
from tests.unit.manifest_facts import identity_at
from tests.unit.recipes import config_class, resolved_config, take_directory, write_run
from tests.unit.tools.compare import run_folders

Target = Callable[[st.DataObject, Path], None]
ENDED: Counter[str] = Counter()  # how many calls were accepted, and how many refused
LONGEST = 2000  # characters of a sentence: names may be long
STEPS = (3, 6, 9)


def sentence_of(call: Callable[[], Any]) -> str | None:
    """Return the sentence with which a call ends; None if it succeeds.

    If a parser of the command line ends the call with status 2, the sentence is what it printed.
    Any other exception passes, because the search looks for such exceptions.
    """
    output = io.StringIO()
    ended = None
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            call()
        except SystemExit as end:
            ended = end
    ENDED["refused" if ended is not None and ended.code else "taken"] += 1
    if isinstance(ended, UserError):
        assert ended.message.strip(), "no sentence"
        assert "Traceback" not in ended.message
        require_no_own_class(ended)
        assert len(ended.message) < LONGEST + sum(map(len, sys.argv)), ended.message
        return ended.message
    if ended is None or ended.code == 0:
        return None
    assert ended.code == 2
    assert output.getvalue().strip(), "nothing was printed"
    return output.getvalue()


@contextlib.contextmanager
def command_line(folder: Path, *words: object) -> Iterator[None]:
    """Change to a folder, with these words after the recipe's name in `sys.argv`."""
    before = sys.argv, os.getcwd()
    sys.argv = ["mnist_mlp.py", *map(str, words)]
    os.chdir(folder)
    try:
        yield
    finally:
        sys.argv = before[0]
        os.chdir(before[1])


@functools.cache
def work(folder: Path) -> Path:
    """Return a folder with all paths of `inputs.PATHS`, of which "whole" is a run."""
    work = folder / "work"
    work.mkdir()
    inputs.make_paths(work)
    write_run(work / "whole", resolved_config())
    return work


# Command lines and paths


def flags(data: st.DataObject, folder: Path) -> None:
    """A command line of any recipe is read, or refused."""
    recipe = data.draw(st.sampled_from(RECIPES))
    words = data.draw(inputs.words_of(config_class(recipe)))
    with command_line(work(folder), *words):
        sentence_of(lambda: parse_config(config_class(recipe), "What it does."))


def space(data: st.DataObject, folder: Path) -> None:
    """The values that a search is to try are read, or refused."""
    recipe = load_recipe(REPOSITORY / "recipes" / f"{data.draw(st.sampled_from(RECIPES))}.py")
    names = [f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(recipe.config_class)]
    ends = st.sampled_from(["1", "2", "0", "-1", "0.1", "1e-400", "inf", "nan", "x", "", "9" * 30])
    value = st.one_of(
        st.tuples(ends, ends, st.sampled_from(["", ":log", ":", ":x"])).map(
            lambda parts: f"{parts[0]}:{parts[1]}{parts[2]}"
        ),
        st.lists(ends, max_size=3).map(",".join),
        st.sampled_from(inputs.ODD_TEXT),
    )
    pairs = data.draw(st.lists(st.tuples(st.sampled_from(names), value), max_size=4))
    words = [word for pair in pairs for word in pair if "\0" not in word]
    with command_line(work(folder)):
        sentence_of(lambda: parse_space(words, recipe))


def directories(data: st.DataObject, folder: Path) -> None:
    """The directory is made, or a sentence says why it can't be."""
    odd_names = st.sampled_from([*inputs.PATHS, *inputs.ODD_TEXT])
    drawn_name = data.draw(st.one_of(odd_names, st.text()))
    output_dir = drawn_name.replace("\0", "")  # a command line can't contain it
    is_outside = output_dir.startswith("/") and "/dev" not in output_dir
    if output_dir.startswith("~") or "runs" in output_dir or is_outside:
        return
    place = work(folder)
    with command_line(place, output_dir):
        directories_made: list[RunDirectory] = []
        resume = data.draw(st.booleans())

        def make() -> None:
            directories_made.append(take_directory(output_dir, resume=resume, timeout=MAX_TIMEOUT))

        sentence = sentence_of(make)
        if directories_made:
            directories_made[0].release()
        else:
            assert sentence


# Files of a run, as the next command reads them


@functools.cache
def whole_run(folder: Path) -> Path:
    """Return a run's directory, as a recipe with checkpoints left it."""
    config = dataclasses.replace(config_class("mnist_mlp")(), epochs=3)
    run = Path(run_folders.write_run(folder / "whole-run", {"recipe": "mnist_mlp"}))
    facts = json.loads((run / "config.json").read_text())
    effective = config.batch_size
    facts |= {"config": dataclasses.asdict(config), "given": dataclasses.asdict(config)}
    facts["environment"] |= {"effective_batch_size": effective}
    facts |= {"wandb_run_id": "01234567", "run_id": tiny_run_at(0).run_id}
    (run / "config.json").write_text(json.dumps(signed_config(facts)))
    status = {"status": "failed", "resumable": True, "reason": "killed", "global_step": 9}
    (run / "status.json").write_text(json.dumps(status))
    (run / "summary.json").unlink()
    save_checkpoints(run / "checkpoints")
    save_model(run / "model", Network(), {"name": "small"}, card="", skeleton=None)
    return run


class Network(nn.Sequential):
    """Weights, tied ones, frozen ones, and statistics."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 2))
        self[2].weight = self[0].weight
        self[3].weight.requires_grad = False


class Counts:
    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = {name: state[name] for name in self.values}


class Training:
    """A small training whose state the checkpoints of these tests hold."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Network()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.progress = Counts(global_step=0, seconds=1.0)
        self.parts = Parts(0, mesh=None)
        self.parts.add("model", self.model)
        self.parts.add("optimizer", self.optimizer)
        self.parts.add("progress", self.progress)
        self.parts.add("random", RandomState(torch.device("cpu")), shared=False)

    def train(self) -> None:
        loss = self.model(torch.randn(8, 4)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.progress.values["global_step"] += 1

    def state(self) -> str:
        """Return a digest of the model's and the optimizer's state."""
        tensors = [*self.model.state_dict().values()]
        for state in self.optimizer.state.values():
            tensors += [torch.as_tensor(value) for value in state.values()]
        data = b"".join(value.detach().contiguous().numpy().tobytes() for value in tensors)
        return hashlib.sha256(data).hexdigest()


def tiny_run_at(step: int) -> RunIdentity:
    data = {"name": "tiny", "sizes": {"train": 8}, "class_names": ["a", "b"]}
    return identity_at(step, recipe="mnist_mlp", model="small", data=data)


# The facts that a resumed run shows.
SHOWN: dict[str, Any] = {
    **run_folders.FACTS,
    "config": {"batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": None, "epochs": 3}
    | {"scale_learning_rate": "no", "base_batch_size": None, "evaluate_only": False},
    "plan": {**run_folders.FACTS["plan"], "rate_scale": 1.0, "log_every": 1, "eval_every": 10},
    "data": {**run_folders.FACTS["data"], "reason": "", "notes": []},
    "memory_plan": {"total_mib": 1.0, "device_mib": 2.0},
}
STATES: set[str] = set()  # of the checkpoints that were saved


def save_checkpoints(folder: Path) -> None:
    training = Training()
    checkpoints = checkpoints_in(folder)
    STATES.add(training.state())  # the initial state
    for step in range(1, STEPS[-1] + 1):
        training.train()
        if step in STEPS:
            checkpoints.save(step, training.parts.collect(), tiny_run_at(step))
            checkpoints.wait()
            STATES.add(training.state())


def resume(data: st.DataObject, folder: Path) -> None:
    """A damaged run resumes from a whole checkpoint, or is refused; no whole file is lost."""
    run = inputs.copied(whole_run(folder), folder / "damaged")
    before = inputs.contents(run)
    damaged: list[str] = []
    for _ in range(data.draw(st.integers(1, 3))):
        sign = data.draw(st.sampled_from([None, signed]))
        damaged.append(os.path.relpath(inputs.damage(data, run, sign), run))
    checkpoint = run / "checkpoints" / "step-00000006"
    resumed_from = data.draw(st.sampled_from(["auto", run, checkpoint]))
    training = Training()
    with command_line(folder, "--resume", resumed_from, "--output-dir", run, "--tracker", "none"):
        sentence = sentence_of(lambda: go_on(training))
    if sentence is None and not any(name.endswith("manifest.json") for name in damaged):
        assert training.state() in STATES, "what was restored is nothing that was saved"
    after = inputs.contents(run)
    may_change = {"status.json", "metrics.jsonl", *damaged}
    for name, content in before.items():
        places = (name, superseded(name), put_aside(name))
        is_kept = any(after.get(place) == content for place in places)
        assert is_kept or name in may_change, f"{name} was lost"


def go_on(training: Training) -> None:
    """Use the files of a run as a recipe does from its command line to its first update."""
    config = parse_config(config_class("mnist_mlp"), "What it does.")
    if config.resume is None:  # the damage removed the run, so another one would start
        return
    directory = take_run_directory(config, "mnist_mlp", MAX_TIMEOUT)
    try:
        single: Any = SimpleNamespace(is_main_process=True, num_processes=1)
        checkpoints = checkpoints_in(directory.path / "checkpoints")
        resumed_name = Path(config.resume).name
        checkpoint_name = resumed_name if resumed_name.startswith("step-") else None
        restore_newest(checkpoints, checkpoint_name, training.parts, tiny_run_at(0))
        log = Log(single, directory.path)
        log.start(
            config, RunConfig(**SHOWN), lambda: {STEP: training.progress.values["global_step"]}
        )
        log.finish({})
    finally:
        directory.release()


def superseded(name: str) -> str:
    """Return where a checkpoint's file is after a resume from an older checkpoint."""
    parts = Path(name).parts
    if len(parts) > 2 and parts[0] == "checkpoints":
        return str(Path(parts[0], f"{parts[1]}.superseded", *parts[2:]))
    return name


def put_aside(name: str) -> str:
    """Return where a checkpoint's file is after a resume that found no whole checkpoint."""
    return name.replace("checkpoints/", "checkpoints-put-aside/", 1)


def config_files(data: st.DataObject, folder: Path) -> None:
    """A damaged `config.json` is repeated by `--config`, or refused."""
    run = inputs.copied(whole_run(folder), folder / "repeated")
    path = run / "config.json"
    recipe = data.draw(st.sampled_from(RECIPES))
    if data.draw(st.booleans()):
        path.write_text(json.dumps(inputs.damaged_json(data, json.loads(path.read_text()))))
    else:
        path.write_bytes(inputs.damaged_bytes(data, path.read_bytes()))
    flag = data.draw(st.sampled_from(["--config", "--evaluate-only --init-from"])).split()
    with command_line(folder, *flag, data.draw(st.sampled_from([path, run]))):
        sentence_of(lambda: parse_config(config_class(recipe), "What it does."))


def models(data: st.DataObject, folder: Path) -> None:
    """A damaged `model/` is refused, or a model gets the weights that the run saved."""
    run = inputs.copied(whole_run(folder), folder / "initial")
    inputs.damage(data, run / "model")
    model = Network()
    if sentence_of(lambda: load_weights(model, run)) is None:
        state = model.state_dict()
        for name, value in load_file(whole_run(folder) / "model" / "model.safetensors").items():
            assert torch.equal(state[name], value), name


# The first file is of a folder that timm publishes, the second one of a run's model.
WEIGHT_FACTS: dict[str, Any] = {
    "config.json": {
        "pretrained_cfg": {"input_size": [3, 8, 8], "mean": [0.5] * 3, "std": [0.25] * 3}
    },
    "model.json": {"channels": 1, "image_size": 8, "mean": [0.5], "std": [0.25]},
}
GREY_FACTS: ImageFacts = {
    "channels": 1,
    "image_size": 8,
    "white_level": None,
    "mean": [0.5],
    "std": [0.25],
    "class_names": ["a", "b"],
    "notes": [],
    "held_out": 0,
}


def initial_weights(data: st.DataObject, folder: Path) -> None:
    """Grey images are scaled as damaged facts about initial weights say, or refused."""
    weights = inputs.emptied(folder / "weights")
    weights.mkdir()
    (weights / "model.safetensors").touch()
    for name in data.draw(st.sampled_from([["config.json"], ["config.json", "model.json"]])):
        facts = inputs.damaged_json(data, WEIGHT_FACTS[name])
        (weights / name).write_text(json.dumps(facts))
    init_from = str(weights)
    sentence_of(lambda: format_of_batches(GREY_FACTS, initial_facts(init_from), init_from))


def comparisons(data: st.DataObject, folder: Path) -> None:
    """Damaged runs are compared, or refused, in each form."""
    whole = folder / "compared-whole"
    if not whole.exists():
        run_folders.write_run(whole)
    runs = [inputs.copied(whole, folder / f"compared-{number}") for number in range(2)]
    for run in runs[: data.draw(st.integers(1, 2))]:
        inputs.damage(data, run)
    forms = [["--json"], ["--markdown"], [], ["--target", "0.8"]]
    words = [*map(str, runs), *data.draw(st.sampled_from(forms))]
    if data.draw(st.integers(0, 30)) == 30:
        words += ["--plot", str(folder / "plot.png")]
    sentence_of(lambda: compare(words))


# Data


def tables(data: st.DataObject, folder: Path) -> None:
    """A folder of tables is tokenised or refused, with the same outcome the second time."""
    inputs.write_tables(data, inputs.emptied(folder / "texts"))
    columns = data.draw(st.sampled_from([(), (), ("text",), ("x",), ("text", "idx")]))
    label = data.draw(st.sampled_from([None, None, "label", "text", "x"]))
    first = sentence_of(lambda: load_folder_of_text(folder / "texts", columns, label))
    second = sentence_of(lambda: load_folder_of_text(folder / "texts", columns, label))
    assert first == second


def damaged_tables(data: st.DataObject, folder: Path) -> None:
    """A folder of tables that is damaged afterwards is tokenised, or refused."""
    whole = folder / "whole-texts"
    if not whole.exists():
        for split, count in (("train", 12), ("test", 6)):
            local_data.write_csv(whole / f"{split}.csv", local_data.sentences(count, 0))
            columns = local_data.sentences(count, 1)
            local_data.write_parquet(whole / f"{split}.parquet", columns)
    damaged = inputs.copied(whole, folder / "damaged-texts")
    form = data.draw(st.sampled_from(["csv", "parquet"]))
    for path in damaged.glob(f"*.{form}"):
        path.unlink()
    inputs.damage(data, damaged)
    sentence_of(lambda: load_folder_of_text(damaged, (), None))


def load_folder_of_text(folder: Path, columns: tuple[str, ...], label: str | None) -> TextData:
    source = find_named(str(folder), None)
    return load_text(
        source, checkpoint="scratch", max_length=16, text_columns=columns, label_column=label
    )


def images(data: st.DataObject, folder: Path) -> None:
    """A folder of images is decoded, or refused."""
    inputs.write_images(data, inputs.emptied(folder / "images"))
    sentence_of(lambda: load_folder_of_images(folder / "images"))


def caches(data: st.DataObject, folder: Path) -> None:
    """With a damaged cache, the samples stay the same, or a sentence refuses it."""
    grey = folder / "grey"
    cache, before = whole_cache(folder)
    inputs.damage(data, inputs.copied(folder / "whole-cache", cache))
    digests: list[str] = []
    if sentence_of(lambda: digests.append(digest_of_samples(grey))) is None:
        assert digests == [before]


@functools.cache
def whole_cache(folder: Path) -> tuple[Path, str]:
    """Return a cache of prepared data and a digest of its samples; "whole-cache" is its copy."""
    local_data.write_image_folder(folder / "grey", ["a", "b"], 3)
    digest = digest_of_samples(folder / "grey")
    (cache,) = (p for p in caches_folder().iterdir() if p.is_dir() and p.name.startswith("grey-"))
    inputs.copied(cache, folder / "whole-cache")
    return cache, digest


def caches_folder() -> Path:
    return Path(os.environ["XDG_CACHE_HOME"], "accelerate-recipes")


def digest_of_samples(folder: Path) -> str:
    data = load_folder_of_images(folder)
    arrays = [a for split in data.splits.values() for a in (split.images, split.labels)]
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def load_folder_of_images(folder: Path) -> ImageData:
    return load_images(
        find_named(str(folder), None),
        image_size=8,
        image_column=None,
        label_column=None,
        dtype=torch.float32,
    )


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        flags,
        space,
        directories,
        resume,
        config_files,
        models,
        initial_weights,
        comparisons,
        tables,
        damaged_tables,
        images,
        caches,
    )
}
