"""A saved view and a sweep for W&B, as far as they can be checked without an account."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from common.config import parse_config
from common.errors import UserError
from common.workspace import SECTIONS, X_AXIS, main
from tests.launch import REPOSITORY, Finished

# Of wandb-workspaces' own making.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb_workspaces")
SWEEP = yaml.safe_load((REPOSITORY / "sweep.yaml").read_text())


def panels(view: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels of a view, as they would be sent."""
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    return [panel for section in sections for panel in section["panels"]]


def test_view_is_printed_without_an_account(capsys: pytest.CaptureFixture[str]) -> None:
    """The view has panels for throughput, memory, loss and accuracy over the global step."""
    main(["me/project", "--name", "Mine", "--dry-run"])
    view = json.loads(capsys.readouterr().out)
    assert (view["entity"], view["project"], view["displayName"]) == ("me", "project", "Mine")
    assert view["spec"]["section"]["settings"]["xAxis"] == X_AXIS
    lines = [panel for panel in panels(view) if panel["viewType"] == "Run History Line Plot"]
    assert {line["config"]["xAxis"] for line in lines} == {X_AXIS}
    shown = {metric for line in lines for metric in line["config"]["metrics"]}
    assert shown >= {
        *("perf/samples_per_second", "memory/peak_allocated_mib", "memory/host_rss_mib"),
        *("train/loss", "eval/loss", "train/accuracy", "eval/accuracy"),
    }
    bars = [panel for panel in panels(view) if panel["viewType"] == "Bar Chart"]
    assert {"perf/samples_per_second"} in [set(bar["config"]["metrics"]) for bar in bars]


def test_view_shows_all_that_is_logged(learned_mlp: Finished) -> None:
    """Every metric that a run logs over its steps has a panel, but for plain counts and times."""
    logged = {name for row in learned_mlp.metrics for name in row}
    shown = {name for section in SECTIONS.values() for names in section.values() for name in names}
    left = {name for name in logged - shown if not name.startswith(("progress/", "time/"))}
    assert left <= {
        *("eval/count", "perf/samples_per_second_per_device"),
        *("perf/tflops_per_device", "eval/best_accuracy"),
    }


def test_without_a_key_one_sentence_says_so() -> None:
    """Saving without an account ends with what to do."""
    with pytest.raises(UserError, match=r"no API key.*--dry-run"):
        main(["me/project"])


@pytest.mark.parametrize("project", ["project", "me/project/run", "https://wandb.ai/me/project"])
def test_what_is_no_project_is_refused(project: str) -> None:
    """A project is named with its entity."""
    with pytest.raises(UserError, match="ENTITY/PROJECT"):
        main([project, "--dry-run"])


def test_view_is_sent_to_wandb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an account the view is sent, and its address printed; a refusal is one sentence."""
    sent: list[Any] = []

    def upsert(view: Any) -> dict[str, Any]:
        if view.project == "missing":
            raise ValueError("project not found")
        sent.append(view)
        return {"upsertView": {"view": {"name": "nw-abc-v", "id": "1"}}}

    monkeypatch.setattr("common.tracking.wandb_mode", lambda: ("online", "https://api.wandb.ai"))
    monkeypatch.setattr("wandb_workspaces.workspaces.internal.upsert_view2", upsert)
    interface = "wandb_workspaces.workspaces.interface"
    monkeypatch.setattr(f"{interface}.get_app_url", lambda api: "https://w.ai")
    monkeypatch.setattr("wandb.Api", lambda: SimpleNamespace())
    main(["me/project"])
    assert [view.project for view in sent] == ["project"]
    assert "saved: https://w.ai/me/project?nw=abc" in capsys.readouterr().out
    with pytest.raises(UserError, match="project not found"):
        main(["me/missing"])


def test_sweep_flags_are_taken_by_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that W&B's agent makes of each end of the sweep's ranges is one that runs."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    assert (REPOSITORY / SWEEP["program"]).is_file()
    config_class = import_module(f"recipes.{Path(SWEEP['program']).stem}").Config
    for least in (True, False):
        values = {}
        for name, asked in SWEEP["parameters"].items():
            ends = [asked[key] for key in ("min", "value", "max") if key in asked]
            values[name] = {"value": (asked.get("values") or ends)[0 if least else -1]}
        parts = create_sweep_command_args({"args": values})
        replaced = {"${env}": ["/usr/bin/env"], "${program}": [SWEEP["program"]]}
        replaced |= {f"${{{name}}}": words for name, words in parts.items()}
        command = [
            word
            for part in create_sweep_command(SWEEP["command"])
            for word in replaced.get(part, [part])
        ]
        assert command[:4] == ["/usr/bin/env", "accelerate", "launch", SWEEP["program"]]
        monkeypatch.setattr(sys, "argv", command[3:])
        config = parse_config(config_class)
        for name, value in values.items():
            assert getattr(config, name.replace("-", "_")) == value["value"]


def test_sweep_chooses_by_validation_data() -> None:
    """The sweep's metric is the one that a run's summary has of validation data alone."""
    assert SWEEP["metric"] == {"name": "eval/best_accuracy", "goal": "maximize"}
    assert SWEEP["parameters"]["validation-share"] == {"value": 0.1}
    assert SWEEP["project"] == "accelerate-recipes"
