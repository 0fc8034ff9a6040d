"""Sources of data, and where prepared data are cached."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from accelerate import Accelerator

from common.config import TrainingConfig
from common.data.prepared_data.cache import cache_folder
from common.data.sources import PUBLIC, choose_source, find_named
from tests.launch import UNREACHABLE
from tests.local_data import (
    grey_images,
    write_image_folder,
    write_image_parquet,
)
from tests.unit.data.loading import images, refusal


def test_built_in_data_on_a_cpu_name_the_flag_for_the_public_data() -> None:
    """The run prints the reason. A user may want the public data set all the same."""
    accelerator = Accelerator(cpu=True)
    source = choose_source(
        TrainingConfig(), accelerator, public="sst2", built_in="docstrings", public_on_cpu=False
    )
    assert source.name == "docstrings"
    assert source.reason == (
        "auto: on a CPU, this recipe trains on docstrings; for sst2, pass --dataset sst2"
    )


def test_each_validation_share_has_its_own_cache(tmp_path: Path) -> None:
    """A run that holds rows out never reads the cache of one that does not."""
    splits = {"train": grey_images(60, 1), "test": grey_images(10, 2)}
    source = find_named(str(write_image_parquet(tmp_path / "grey", splits)), None)
    folders = {
        cache_folder(dataclasses.replace(source, validation_share=share))
        for share in (None, 0.1, 0.2)
    }
    assert len(folders) == 3


def test_changed_data_is_decoded_again(tmp_path: Path) -> None:
    """A cache is used only while the folder's files stay the same."""
    folder = write_image_folder(tmp_path / "pets", ["cat", "dog"], per_class=10)
    assert len(images(folder).splits["train"]) == 18
    caches = list((tmp_path / "cache" / "accelerate-recipes").glob("pets-*"))
    assert len([path for path in caches if path.is_dir()]) == 1
    write_image_folder(folder, ["cat", "dog", "emu"], per_class=10)
    data = images(folder)
    assert data.class_names == ["cat", "dog", "emu"]
    assert len(data.splits["train"]) == 27


def test_cache_depends_on_size_and_data() -> None:
    """Another size or data set has another cache."""
    source = find_named("digits", None)
    assert cache_folder(source, size=8) == cache_folder(source, size=8)
    assert cache_folder(source, size=8) != cache_folder(source, size=9)
    other = dataclasses.replace(source, fingerprint="other")
    assert cache_folder(source, size=8) != cache_folder(other, size=8)


def test_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    """The message says what to pass."""
    (tmp_path / "train.doc").write_text("text")
    message = refusal(lambda: find_named(str(tmp_path / "train.doc"), None))
    assert ".csv" in message
    assert "folder" in message


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("cifar-10", "cifar10"), ("Digit", "digits"), ("{}/Flower", "{}/flowers")],
)
def test_nearest_name_is_suggested(name: str, suggestion: str, tmp_path: Path) -> None:
    """The suggestion is a public data set, a built-in one, or a folder next to the missing one."""
    (tmp_path / "flowers").mkdir()
    message = refusal(lambda: find_named(name.format(tmp_path), None))
    assert f"pass {suggestion.format(tmp_path)} if you meant that, " in message
    assert "if you meant that" not in refusal(lambda: find_named("nobody/nothing", None))


@pytest.mark.parametrize(
    ("name", "is_resumed", "advice"),
    [
        ("nobody/nothing", False, "check the spelling and the connection, log in with hf auth"),
        ("/no-such-folder", False, "check the spelling, or pass "),
        ("./no-such-folder", False, "check the spelling, or pass "),
        ("nobody/nothing", True, "repeat the command when the Hub can be reached, or pass the new"),
        ("/no-such-folder", True, "pass the new path of these data with --dataset"),
    ],
)
def test_advice_fits_a_resume_and_a_path(name: str, is_resumed: bool, advice: str) -> None:
    """A resume accepts no other data, and no connection helps to find a path."""
    message = refusal(lambda: find_named(name, None, is_resumed))
    assert f"does not answer: {advice}" in message
    assert ("digits" in message) is not is_resumed


@pytest.mark.parametrize("name", ["mnist", "nobody/nothing", "./no-such-folder"])
def test_missing_data_set_is_never_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the built-in data sets instead."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", UNREACHABLE)
    message = refusal(lambda: find_named(name, None))
    assert name in message
    assert "digits" in message
    assert "docstrings" in message


def test_cached_data_set_is_found_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub's cache is used while the Hub does not answer. Short names map to Hub ids."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", UNREACHABLE)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name, (location, configuration) in PUBLIC.items():
        reference = tmp_path / f"datasets--{location.replace('/', '--')}" / "refs" / "main"
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text("0123abcd\n")
        source = find_named(name, None)
        assert (source.location, source.configuration) == (location, configuration)
        assert (source.name, source.fingerprint) == (name, "0123abcd")


@pytest.mark.parametrize("name", ["synthetic", "digits", "docstrings"])
def test_folder_named_like_built_in_data_is_read(name: str, tmp_path: Path) -> None:
    """A local folder wins even with the name of a built-in data set."""
    data = images(write_image_folder(tmp_path / name, ["cat", "dog"], per_class=10))
    assert data.class_names == ["cat", "dog"]
    assert data.source.location == str(tmp_path / name)
