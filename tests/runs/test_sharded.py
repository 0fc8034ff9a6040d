"""FSDP2 on CPU processes makes the updates of DDP with less memory, on any number of processes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.checkpoints.folders import read_manifest, step_folders
from common.errors import UserError
from common.training.sharding.fsdp_request import SUPPORTED_SETTINGS, take_fsdp_request
from tests.conftest import SHIFTED_UPDATES, first
from tests.edited_copies import edited
from tests.examples import EXAMPLES
from tests.jobs import MLP, Job, final_weights, newest_step, rows_without_clock
from tests.launch import LAUNCHES, REPOSITORY, SHARDED, Finished, Launcher, Runner
from tests.runs.test_equivalence import assert_same_run, assert_same_weights

LAUNCHERS: tuple[Launcher, Launcher] = ("two forks", "two shards")


def flags_for(launcher: Launcher, images: Path) -> tuple[Any, ...]:
    """Return flags for updates of 64 samples, divided into micro-batches of 16."""
    accumulation = 4 // LAUNCHES[launcher].ranks
    cut = ("--batch-size", 16, "--gradient-accumulation-steps", accumulation)
    updates = ("--dataset", images, *SHIFTED_UPDATES, "--checkpoint-every", 2)
    return (*updates, "--tracker", "none", *cut)


@pytest.fixture(scope="session")
def sharded_mlp(runner: Runner, odd_images: Path) -> Finished:
    """A run of two processes that hold shards and accumulate twice."""
    flags = (*flags_for("two shards", odd_images), "--keep-checkpoints", 9)
    return runner.shared("mnist_mlp", *flags, launcher="two shards")


def test_mlp_in_shards_is_the_mlp(
    accumulated_mlp: Finished, distributed_mlp: Finished, sharded_mlp: Finished
) -> None:
    """Shards give the losses, rates, counts and weights of one process and of two with DDP."""
    assert sharded_mlp.config["environment"]["sharding"] == "FSDP2"
    assert sharded_mlp.config["environment"]["world_size"] == 2
    for other in (accumulated_mlp, distributed_mlp):
        assert other.config["environment"]["sharding"] == "no"
        assert_same_run(other, sharded_mlp, weights_within=1e-5)
        for name in ("train/learning_rate", "progress/samples", "val/count"):
            assert other.series(name) == sharded_mlp.series(name), name


@pytest.mark.slow
def test_same_updates_however_they_are_cut(
    runner: Runner, odd_images: Path, sharded_mlp: Finished
) -> None:
    """One process, two with DDP and two with FSDP2 make the same updates of four micro-batches.

    The losses agree within rounding, the rates and counts exactly.
    """
    launchers: tuple[Launcher, ...] = ("fork", "two forks")
    for launcher in launchers:
        flags = flags_for(launcher, odd_images)
        other = runner.run("mnist_mlp", *flags, launcher=launcher)
        for name in ("train/loss", "val/loss"):
            expected = pytest.approx(other.series(name), rel=2e-4, abs=2e-6)
            assert sharded_mlp.series(name) == expected, name
        for name in ("train/learning_rate", "progress/samples", "val/count"):
            assert other.series(name) == sharded_mlp.series(name), name
        if launcher == "fork":  # DDP rounds differently, which Adam's first updates amplify
            assert_same_weights(other.weights(), sharded_mlp.weights(), within=1e-5)


@pytest.mark.slow
def test_four_shards_are_the_mlp(
    runner: Runner, odd_images: Path, accumulated_mlp: Finished
) -> None:
    """Four shards make the same updates, though some hold no row of the smallest weights."""
    flags = flags_for("four shards", odd_images)
    four = runner.run("mnist_mlp", *flags, launcher="four shards")
    assert four.config["environment"]["world_size"] == 4
    assert_same_run(accumulated_mlp, four, weights_within=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [(), ("--gradient-checkpointing",)])
def test_bert_in_shards_is_the_bert(
    checkpointing: tuple[str, ...], runner: Runner, distributed_bert: Finished
) -> None:
    """BERT in shards trains to the weights of DDP, and Transformers reads its export."""
    config = ("--config", distributed_bert.directory, *checkpointing)
    run = runner.run("bert", *config, launcher="two shards")
    assert_same_run(distributed_bert, run, weights_within=2e-4)
    from transformers import BertForSequenceClassification

    bert: Any = BertForSequenceClassification
    model, problems = bert.from_pretrained(run.directory / "model", output_loading_info=True)
    assert not any(problems.values())
    assert model.config.architectures == ["BertForSequenceClassification"]
    assert_same_weights(dict(model.named_parameters()), run.weights(), within=0)


@pytest.mark.slow
def test_resnet_in_shards_is_the_resnet(runner: Runner, distributed_resnet: Finished) -> None:
    """A ResNet in shards trains to the weights of DDP with about half of its lasting memory."""
    flags = ("--config", distributed_resnet.directory)
    run = runner.run("resnet", *flags, launcher="two shards")
    for name in ("train/loss", "train/grad_norm", "train/learning_rate", "val/count"):
        expected = pytest.approx(distributed_resnet.series(name), rel=1e-3)
        assert run.series(name) == expected, name
    assert_same_weights(run.weights(), distributed_resnet.weights(), 1e-3)
    memory_in_shards = run.read("memory.json")
    memory_of_ddp = distributed_resnet.read("memory.json")
    lasting = ("weights", "gradients", "optimizer_state")
    for figure in ("planned_mib", "measured_mib"):
        in_shards = sum(memory_in_shards[part][figure] for part in lasting)
        of_ddp = sum(memory_of_ddp[part][figure] for part in lasting)
        assert in_shards <= 0.55 * of_ddp, figure
    # The 43 MiB that FSDP gathers do not count as activations; the layout of some differs.
    activations = memory_in_shards["activations"]["measured_mib"]
    activations_of_ddp = memory_of_ddp["activations"]["measured_mib"]
    assert activations == pytest.approx(activations_of_ddp, rel=0.2)


def killed_halfway(run: Finished, directory: Path) -> None:
    """Copy a finished run as if it had been killed halfway."""
    shutil.copytree(run.directory, directory)
    folders = step_folders(directory / "checkpoints")
    for folder in (*folders[len(folders) // 2 :], directory / "model"):
        shutil.rmtree(folder)
    (directory / "summary.json").unlink()
    (directory / "status.json").write_text(json.dumps({"status": "running", "resumable": True}))
    assert 0 < newest_step(directory) < run.summary["progress/global_step"]


@pytest.mark.parametrize("recipe", first(0, ["cifar10_fast", "resnet"], in_ci=1))
def test_muon_makes_the_same_updates_in_shards(
    recipe: str, runner: Runner, odd_images: Path, thin_resnet: Path, tmp_path: Path
) -> None:
    """Orthogonal updates are those of whole matrices, and a resume ends with the same bits."""
    own_flags = {
        "cifar10_fast": ("--widths", 8, 16, "--image-size", 16),
        "resnet": ("--optimizer", "muon", "--image-size", 8, "--max-grad-norm", 0),
    }
    script = thin_resnet if recipe == "resnet" else REPOSITORY / "recipes" / f"{recipe}.py"
    data = ("--dataset", odd_images, "--batch-size", 16, "--mixed-precision", "no")
    length = ("--max-steps", 6, "--log-every", 1, "--checkpoint-every", 2, "--keep-checkpoints", 9)
    # At higher rates, differences in rounding grow beyond the tolerance within these updates.
    flags = (*data, *length, *own_flags[recipe], "--learning-rate", 0.01, "--tracker", "none")
    whole, shards = (runner.run(script, *flags, launcher=launcher) for launcher in LAUNCHERS)
    for name in ("train/loss", "train/learning_rate", "val/count"):
        assert shards.series(name) == pytest.approx(whole.series(name), rel=1e-3), name
    # Orthogonal updates amplify rounding in directions with small gradients, so values differ.
    weights_in_shards = shards.weights()
    for name, value in whole.weights().items():
        difference = (weights_in_shards[name] - value).double().norm()
        assert difference <= 0.1 * value.double().norm(), name
    directory = tmp_path / "run"
    killed_halfway(shards, directory)
    runner.run(script, "--resume", directory, launcher="two shards", output_directory=False)
    assert rows_without_clock(directory) == rows_without_clock(shards.directory)
    assert final_weights(directory) == final_weights(shards.directory)


@pytest.mark.parametrize("launcher", first(0, ["two shards", "fork", "four shards", "two forks"]))
def test_shards_resume_on_other_processes(
    launcher: Launcher, runner: Runner, odd_images: Path, sharded_mlp: Finished, tmp_path: Path
) -> None:
    """A run in shards resumes to the same bits on as many processes.

    It resumes within rounding on one process, on four, and without shards.
    """
    directory = tmp_path / "run"
    killed_halfway(sharded_mlp, directory)
    flags = flags_for(launcher, odd_images)
    again = (*flags, "--output-dir", directory, "--resume", "auto")
    resumed = runner.run("mnist_mlp", *again, launcher=launcher, output_directory=False)
    assert "resuming" in resumed.output
    if launcher == "two shards":
        assert rows_without_clock(directory) == rows_without_clock(sharded_mlp.directory)
        assert final_weights(directory) == final_weights(sharded_mlp.directory)
    rest = Finished(resumed.command, 0, "", "", directory, directory)
    assert_same_run(sharded_mlp, rest, weights_within=1e-5)


@pytest.mark.slow
def test_whole_checkpoint_resumes_in_shards(
    runner: Runner, accumulated_mlp: Finished, tmp_path: Path
) -> None:
    """Two processes in shards resume a run of one process that has saved whole tensors."""
    directory = tmp_path / "run"
    killed_halfway(accumulated_mlp, directory)
    again = ("--output-dir", directory, "--resume", "auto", "--gradient-accumulation-steps", 1)
    flags = ("--config", accumulated_mlp.directory, *again)
    resumed = runner.run("mnist_mlp", *flags, launcher="two shards", output_directory=False)
    rest = Finished(resumed.command, 0, "", "", directory, directory)
    assert_same_run(accumulated_mlp, rest, weights_within=1e-5)


def test_each_rank_writes_its_rows(sharded_mlp: Finished) -> None:
    """Each rank saves its rows of the weights and moments, and no file has them whole."""
    folder = step_folders(sharded_mlp.directory / "checkpoints")[0]
    manifest = read_manifest(folder)
    shapes = {name: value.shape for name, value in sharded_mlp.weights().items()}
    in_rows = {name.split("-")[0] for name in manifest.files if "-of-2" in name}
    assert in_rows == {"model", "optimizer"}
    for part in in_rows:
        rows = [load_file(folder / f"{part}-{rank}-of-2.safetensors") for rank in range(2)]
        assert rows[0].keys() == rows[1].keys()
        for name in rows[0]:
            whole = torch.cat([rows_of_rank[name] for rows_of_rank in rows])
            assert whole.shape == (shapes[name] if part == "model" else whole.shape)
            assert len(rows[0][name]) == -(-len(whole) // 2)
        assert part != "model" or rows[0].keys() == shapes.keys()
    names = {path.name for path in folder.iterdir()}
    assert "model.safetensors" not in names


@pytest.mark.slow
def test_evaluation_of_shards(runner: Runner, odd_images: Path, sharded_mlp: Finished) -> None:
    """`--evaluate-only` in shards gives the run's figures, also on a split of an odd size."""
    flags = ("--evaluate-only", "--init-from", sharded_mlp.directory, "--dataset", odd_images)
    flags = (*flags, "--mixed-precision", "no", "--tracker", "none", "--batch-size", 8)
    run = runner.run("mnist_mlp", *flags, launcher="two shards")
    for name in ("test/loss", "test/accuracy", "test/count"):
        assert run.summary[name] == pytest.approx(sharded_mlp.summary[name], rel=1e-6), name


# Examples whose code does not mention shards: two networks, an average of the weights, tied
# weights, a model of Transformers, images as outputs.
WITHOUT_SHARDS = ("gan", "averaged", "lora", "dqn", "character_model", "causal_lm", "denoiser")


@pytest.mark.parametrize("name", first(0, WITHOUT_SHARDS, in_ci=3))
def test_example_in_shards_is_the_example(
    name: str, runner: Runner, request: pytest.FixtureRequest
) -> None:
    """An example in shards has the losses and the figures of the example with DDP."""
    (example,) = [example for example in EXAMPLES if example.name == name]
    few = example.same_on_two or ("--max-steps", 2, "--batch-size", 16)
    flags = (*example.flags, *few, "--tracker", "none", "--log-every", 1, "--mixed-precision", "no")
    if example.dataset is not None:
        flags = (*flags, "--dataset", request.getfixturevalue(example.dataset))
    whole, shards = (runner.run(example.path, *flags, launcher=launcher) for launcher in LAUNCHERS)
    for metric in ("train/loss", "train/grad_norm", "train/learning_rate"):
        assert whole.series(metric) == pytest.approx(shards.series(metric), rel=1e-3), metric
    for metric, value in whole.summary.items():
        if metric.startswith(("val/", "test/")):
            assert shards.summary[metric] == pytest.approx(value, rel=2e-3), metric


@pytest.fixture(scope="module")
def peaked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy whose average of the weights is best after update 12, and worse ever after."""
    line = "    return sums.result()\n"
    worse = 'return sums.result() | {"accuracy": -abs(run.progress.global_step - 12) / 100}'
    folder = tmp_path_factory.mktemp("peaked")
    return edited(REPOSITORY / "examples" / "averaged.py", folder, (line, f"    {worse}\n"))


@pytest.mark.slow
def test_killed_shards_end_bit_equal(peaked: Path, runner: Runner, tmp_path: Path) -> None:
    """Killed shards with an average of the weights resume to the same bits and best model.

    One process resumes the same run without shards and keeps the same best model.
    """
    flags = ("--dataset", "digits", "--tracker", "none", "--log-every", 2, "--eval-every", 4)
    flags = (*flags, "--checkpoint-every", 4, "--keep-checkpoints", 9, "--early-stopping", 99)
    flags = (*flags, "--max-steps", 32, "--hidden-sizes", 64, 48, "--dropout", 0.2)
    whole = runner.run(peaked, *flags, launcher="two shards")
    directory = tmp_path / "run"
    other = tmp_path / "other"
    words = (peaked, *flags, "--output-dir", directory)
    job = Job(runner, *words, directory=directory, launcher="two shards")
    job.wait_for_step(16)
    job.kill()
    assert 16 <= newest_step(directory) < 32, "the kill came too late"
    folder = directory / "checkpoints"
    best = {f"best-{12:08d}-{rank}-of-2.safetensors" for rank in range(2)}
    assert best <= {path.name for path in folder.iterdir()}
    shutil.copytree(directory, other)
    for into, launcher in ((directory, "two shards"), (other, "fork")):
        again = (*flags, "--output-dir", into, "--resume", "auto")
        run = runner.run(peaked, *again, launcher=launcher, output_directory=False)
        assert "resuming" in run.output
        kept = load_file(into / "model" / "model.safetensors")
        assert_same_weights(kept, whole.weights(), within=0)
        assert json.loads((into / "summary.json").read_text())["progress/kept_step"] == 12
    assert final_weights(directory) == final_weights(whole.directory)
    assert rows_without_clock(directory) == rows_without_clock(whole.directory)


@pytest.mark.slow
def test_network_that_holds_a_sharded_one_is_exported(runner: Runner, tmp_path: Path) -> None:
    """A network around a sharded one is not sharded itself, and is exported as on one process."""
    script = REPOSITORY / "examples" / "averaged.py"
    text = script.read_text(encoding="utf-8")
    text = text.replace("(run, average", "(run, around").replace(
        "load_best(average", "load_best(around"
    )
    keep = "        run.keep("
    text = text.replace(keep, f"        around = nn.Sequential(average.module)\n{keep}")
    copy = tmp_path / "averaged.py"
    copy.write_text(text, encoding="utf-8")
    flags = ("--dataset", "digits", "--tracker", "none", "--max-steps", 2, "--hidden-sizes", 16)
    flags = (*flags, "--mixup", 0, "--effective-batch-size", 128, "--mixed-precision", "no")
    whole = runner.run(copy, *flags, launcher="fork")
    shards = runner.run(copy, *flags, launcher="two shards")
    assert "0.head.weight" in shards.weights()
    assert_same_weights(whole.weights(), shards.weights(), within=1e-5)


def test_whole_tensors_beside_shards_are_explained(runner: Runner, tmp_path: Path) -> None:
    """A second network that is not sharded can't take the weights of one that is."""
    batches = "        for batch in run.batches(train_loader):\n"
    line = "            build_model(config, data)[0].load_state_dict(model.state_dict())\n"
    copy = edited("mnist_mlp", tmp_path, (batches, batches + line))
    run = runner.run(copy, *MLP, "--max-steps", 2, launcher="two shards", succeeds=False)
    assert "Likely cause: the weights of a sharded network (FSDP2) were combined" in run.errors


@pytest.mark.slow
def test_inf_on_one_rank_is_never_applied(runner: Runner, tmp_path: Path) -> None:
    """One infinite gradient in the rows of one rank stops all ranks before it is saved."""
    backward = "                accelerator.backward(loss)\n"
    spoil = "run.progress.global_step == 13 and accelerator.process_index == 1"
    spoil = f"if {spoil}: next(model.parameters()).grad.to_local()[0, 0] = float('inf')"
    directory = tmp_path / "run"
    at = "                if accelerator.sync_gradients:\n"
    spoiled = f"{backward}{at}    {' ' * 16}{spoil}\n"
    recipe = edited("mnist_mlp", tmp_path, (backward + at, spoiled))
    flags = (*MLP, "--mixed-precision", "no", "--output-dir", directory)
    run = runner.run(recipe, *flags, launcher="two shards", output_directory=False, succeeds=False)
    assert run.returncode != 0
    message = "error: a gradient or the loss became NaN or infinite in update 15"
    assert run.printed().count(message) == 1
    status = json.loads((directory / "status.json").read_text())
    assert status["status"] == "failed"
    assert not status["resumable"]
    newest = step_folders(directory / "checkpoints")[-1]
    assert newest.name == "step-00000012"
    for rank in range(2):
        rows = load_file(newest / f"model-{rank}-of-2.safetensors")
        assert all(value.isfinite().all() for value in rows.values())


def test_networks_in_shards(runner: Runner) -> None:
    """The script `in_shards.py` passes its checks of sharded networks on both ranks.

    A call of a sharded network with other weights ends in a sentence.
    """
    script = REPOSITORY / "tests" / "in_shards.py"
    run = runner.run(script, launcher="two shards", output_directory=False)
    assert run.output.count("the network is sharded, and its parameters were replaced") == 2


@pytest.mark.parametrize("launcher", first(0, LAUNCHERS))
def test_collectives_get_tensors_of_the_device_only(
    launcher: Launcher, runner: Runner, odd_images: Path
) -> None:
    """Collectives get no tensors of the host, which NCCL would refuse, with DDP or with shards."""
    script = REPOSITORY / "tests" / "host_and_device.py"
    recipe = REPOSITORY / "recipes" / "mnist_mlp.py"
    flags = ("--dataset", odd_images, "--tracker", "none", "--batch-size", 16, "--epochs", 9)
    every = ("--log-every", 1, "--eval-every", 2, "--checkpoint-every", 2)
    run = runner.run(script, recipe, *flags, *every, "--max-steps", 4, launcher=launcher)
    collectives = {"two shards": "broadcast from common.training.sharding.networks"}
    expected = collectives.get(launcher, "all_reduce from common.ranks.agreement")
    assert expected in run.output, "the collectives were not looked at"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"FSDP_VERSION": "1"}, "fsdp_version=1 is not supported by recipes: set it to 2"),
        (
            {"FSDP_RESHARD_AFTER_FORWARD": "false"},
            "fsdp_reshard_after_forward=false is not supported",
        ),
        ({"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, "fsdp_auto_wrap_policy=no_wrap is not supported"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "and pass --gradient-checkpointing"),
        (
            {"FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer"},
            "is not supported by recipes: remove it from the launcher's configuration",
        ),
    ],
)
def test_unsupported_sharding_is_refused(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting that recipes do not support is refused by name; supported ones are taken."""
    monkeypatch.setattr(os, "environ", {**SHARDED, "FSDP_MIN_NUM_PARAMS": "100000000", **variables})
    with pytest.raises(UserError, match=message):
        take_fsdp_request()
    supported = {f"FSDP_{name}": value.upper() for name, value in SUPPORTED_SETTINGS.items()}
    for yes in ("true", "1", "Yes"):
        monkeypatch.setattr(os, "environ", {**SHARDED, **supported, "ACCELERATE_USE_FSDP": yes})
        assert take_fsdp_request()
        assert not take_fsdp_request()  # the request is hidden from Accelerate
