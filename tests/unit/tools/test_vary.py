"""Variants: each has a run of its own, which is kept when the command is repeated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from filelock import FileLock

from common.errors import UserError
from common.tools.launching.command import command_of_run
from common.tools.vary.command import main
from common.tools.vary.records import VARY_FILE, read_command
from common.tools.vary.variants import claim_folder, directory_name, variant_title
from tests.unit.tools.tune.test_search import STUB

pytestmark = pytest.mark.usefixtures("forking_python", "restored_sigterm")  # for the variants


def begun(folder: Path) -> list[str]:
    """Return the names of the runs, each as often as the run started."""
    names = []
    for log in folder.glob("*.log"):
        starts = log.read_text().count("begins after step")
        names += [log.stem] * starts
    return sorted(names)


def test_variants_are_run_once_and_compared_over_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command with more seeds keeps the finished runs and adds the missing ones."""
    monkeypatch.chdir(tmp_path)
    arguments = [str(STUB), "--learning-rate", "0.1,0.01", "--epochs", "2"]
    main(arguments)
    (folder,) = (tmp_path / "runs").iterdir()
    assert begun(folder) == ["learning-rate=0.01", "learning-rate=0.1"]
    assert "±" not in (folder / "table.md").read_text()
    assert "--seeds 3 keeps these runs and adds others" in capsys.readouterr().out
    card = folder / "learning-rate=0.01" / "model" / "README.md"
    card.parent.mkdir()
    card.write_text("its own\n")
    for _ in range(2):
        main([*arguments, "--seeds", "2"])
    assert begun(folder) == [
        "learning-rate=0.01",
        "learning-rate=0.01-seed-1",
        "learning-rate=0.1",
        "learning-rate=0.1-seed-1",
    ]
    original, heading, table = card.read_text().partition("\n## The same with other seeds\n")
    assert original == "its own\n"
    assert heading
    assert table.startswith("\n| mean ± standard deviation | learning-rate=0.01 |\n")
    assert "| seeds | 0 1 |" in table
    assert "| best accuracy, validation | 0.7500 ± 0.0000 |" in table
    assert "with other seeds" not in table
    title, _, head, _, *rows = (folder / "table.md").read_text().splitlines()
    assert title == (
        "stub_recipe on stub (train 90, test 20, validation 10), compared on validation data"
    )
    titles = "learning-rate=0.1 (baseline) | learning-rate=0.01"
    assert head == f"| mean ± standard deviation | {titles} |"
    assert "| best accuracy, validation | 1.0000 ± 0.0000 | 0.7500 ± 0.0000 |" in rows
    assert "learning-rate=0.01 against learning-rate=0.1:" in rows
    assert (folder / "picture.png").stat().st_size > 10_000
    assert "best accuracy" in capsys.readouterr().out
    other = [str(STUB), "--learning-rate", "0.1,0.02", "--output-dir", str(folder)]
    with pytest.raises(
        UserError, match=r"variants of another command: recipes vary .* 0\.1,0\.01 "
    ):
        main(other)
    (folder / VARY_FILE).unlink()
    with pytest.raises(UserError, match="contains files, but no variants to continue"):
        main(other)


def shares_of_runs(folder: Path) -> set[float | None]:
    """Return the validation shares with which the runs of a folder trained."""
    configs = [json.loads(path.read_text()) for path in folder.glob("*/config.json")]
    return {config["config"]["validation_share"] for config in configs}


@pytest.mark.parametrize(
    ("flags", "share"),
    [
        (["--learning-rate", "0.1,0.01"], 0.1),
        (["--learning-rate", "0.1,0.01", "--validation-share", "0.3"], 0.3),
        (["--learning-rate", "0.1"], None),
        (["--num-processes", "1"], None),
    ],
)
def test_variants_are_chosen_on_validation_data(
    flags: list[str],
    share: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A share is held out as in a search. A stated one wins, and one variant chooses nothing."""
    monkeypatch.chdir(tmp_path)
    main([str(STUB), *flags, "--epochs", "1", "--output-dir", "v"])
    assert shares_of_runs(tmp_path / "v") == {share}
    printed = " ".join(capsys.readouterr().out.split())
    assert ("variants are chosen on validation data: 10 % of train" in printed) == (share == 0.1)


def test_failed_variant_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are still compared."""
    monkeypatch.chdir(tmp_path)
    arguments = [
        str(STUB),
        "--learning-rate",
        "0.1,0.5",
        "--fail-above",
        "0.3",
        "--output-dir",
        "v",
    ]
    with pytest.raises(UserError, match="1 run failed"):
        main(arguments)
    assert "learning-rate=0.5  failed: learning rate 0.5 is too high" in capsys.readouterr().out
    assert "\n|  | learning-rate=0.1 |\n" in (tmp_path / "v" / "table.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--learning-rate", "0.1:1"],
            "--learning-rate has a range of values, .*: pass single values with commas",
        ),
        (
            ["--learning-rate", "0.1,1", "--seeds", "0"],
            "--seeds 0 is out of range: pass 1 or more",
        ),
        (["--num-processes", "1,x"], "is not a list of numbers from 1 to 9999: pass .*, as in 1,2"),
        (["--num-processes", "0,1"], "is not a list of numbers from 1 to 9999: pass .*, as in 1,2"),
        (
            ["--num-processes", "1,99999"],
            "is not a list of numbers from 1 to 9999: pass .*, as in 1,2",
        ),
        (["--seed", "3", "--seeds", "2"], "leave --seed out"),
        (["--seed", "3,4", "--seeds", "2"], "leave --seed out"),
        (["--compile", "false,true", "--no-compile"], "--no-compile contradicts --compile"),
        (["--batch-size", "64,128", "--batch_size", "32"], "--batch-size is given twice"),
        (["--hidden-sizes", "8 16,8  16"], "two variants would have the same folder"),
        (["--resume", "auto"], "leave --resume out"),
    ],
)
def test_mistakes_are_found_before_any_run(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is created."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        main([str(STUB), *arguments])
    assert [*tmp_path.iterdir()] == []


def test_folder_in_use_is_refused_with_the_flag_of_this_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool has no flag --study."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "v"
    folder.mkdir()
    arguments = [str(STUB), "--epochs", "1", "--output-dir", "v"]
    with (
        FileLock(folder / ".lock"),
        pytest.raises(UserError, match=r"another job is writing to .* another --output-dir$"),
    ):
        main(arguments)


def test_record_of_the_command_may_be_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command continues. A record without a command, or of other types, is named."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "v"
    folder.mkdir()
    command = ["r.py", "--epochs", "1"]
    claim_folder(folder, command)
    assert read_command(folder) == command
    record = folder / VARY_FILE
    claim_folder(folder, command)
    assert '"command"' in record.read_text()
    for damaged in ("{}", '{"command": "r.py"}', '{"command": [1]}', "[]", "half"):
        record.write_text(damaged)
        with pytest.raises(UserError, match=f"{VARY_FILE} .*: restore it from a backup"):
            claim_folder(folder, command)


def test_recipe_must_come_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise the value of a flag would be taken for the recipe."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="put the recipe first"):
        main(["--learning-rate", "0.1,1", str(STUB)])


def test_repeated_number_of_processes_is_one_variant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A number of processes that is repeated does not count as a second run."""
    monkeypatch.chdir(tmp_path)
    main([str(STUB), "--num-processes", "1,1", "--epochs", "1", "--output-dir", "v"])
    assert begun(tmp_path / "v") == ["these-flags"]
    assert "±" not in (tmp_path / "v" / "table.md").read_text()


def test_recipe_must_accept_every_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here only the one in the middle is wrong."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main([str(STUB), "--mixed-precision", "no,half,bf16"])
    assert [*tmp_path.iterdir()] == []


def test_directories_of_variants_state_flags_and_values() -> None:
    """Only letters, digits and a few signs are in the name of a directory."""
    assert directory_name("dropout=0.1, batch-size=64") == "dropout=0.1_batch-size=64"
    assert directory_name("hidden-sizes=8 16, processes=2") == "hidden-sizes=8-16_processes=2"
    assert directory_name("model=google/bert: a*b") == "model=google-bert-a-b"
    assert directory_name("these flags") == "these-flags"
    long_names = [directory_name(f"model={'x' * 300}{end}") for end in "ab"]
    assert len({*long_names}) == 2
    assert all(len(name) < 150 for name in long_names)


def test_titles_of_variants_have_flags_and_values() -> None:
    """A value alone does not tell a reader what it is of."""
    assert variant_title("", {"dropout": "0.1"}) == "dropout=0.1"
    values = {"mixed-precision": "no", "hidden-sizes": "8 16"}
    assert variant_title("2", values) == "mixed-precision=no, hidden-sizes=8 16, processes=2"
    assert variant_title("", {}) == "these flags"


def test_several_processes_use_accelerate_launch(tmp_path: Path) -> None:
    """A single process is started directly."""
    alone = command_of_run([], "r.py", ["--x", "1"], tmp_path)
    several = command_of_run(["--num_processes", "2"], "r.py", ["--x", "1"], tmp_path)
    assert alone[1:4] == ["r.py", "--x", "1"]
    assert several[3:] == ["launch", "--num_processes", "2", *alone[1:]]
