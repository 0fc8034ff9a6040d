"""Saved views and reports for W&B, as far as an account is not needed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import UserError
from common.metric_names import STEP
from common.tools.workspace import goal_metrics, main
from common.track.names import EFFICIENCY, METRICS, SPLITS

# wandb-workspaces itself raises these warnings.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb_workspaces")


def panels(view: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels of a view as they are sent."""
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    return [panel for section in sections for panel in section["panels"]]


def test_view_is_printed_without_an_account(capsys: pytest.CaptureFixture[str]) -> None:
    """The view has panels for throughput, memory, loss and accuracy over the global step."""
    main(["me/project", "--name", "Mine", "--dry-run"])
    view = json.loads(capsys.readouterr().out)
    assert (view["entity"], view["project"], view["displayName"]) == ("me", "project", "Mine")
    assert view["spec"]["section"]["settings"]["xAxis"] == STEP
    lines = [panel for panel in panels(view) if panel["viewType"] == "Run History Line Plot"]
    assert {line["config"]["xAxis"] for line in lines} == {STEP}
    shown = {metric for line in lines for metric in line["config"]["metrics"]}
    assert shown >= {
        "perf/samples_per_second",
        "memory/peak_allocated_mib",
        "memory/host_rss_mib",
        "train/loss",
        "val/loss",
        "train/accuracy",
        "val/accuracy",
    }
    bars = [panel for panel in panels(view) if panel["viewType"] == "Bar Chart"]
    assert {"perf/samples_per_second"} in [set(bar["config"]["metrics"]) for bar in bars]


def test_view_shows_every_metric_that_has_a_panel(capsys: pytest.CaptureFixture[str]) -> None:
    """A metric of a split has a curve for each split, and best values are bars."""
    main(["me/project", "--objective", "rmse:min", "--dry-run"])
    view_panels = panels(json.loads(capsys.readouterr().out))
    shown = {metric for panel in view_panels for metric in panel["config"].get("metrics", [])}
    for name, metric in METRICS.items():
        names = [name] if "/" in name else [f"{split}/{name}" for split in SPLITS]
        assert (shown >= set(names)) == bool(metric.panel), name
    assert shown >= {"train/rmse", "val/rmse", "test/rmse", "val/best_rmse"}


def test_only_metrics_of_evaluations_are_goals() -> None:
    """No run logs the scaling efficiency, so without --objective it gets no bar and no column."""
    goals = goal_metrics(None)
    assert {"accuracy", "psnr"} <= set(goals)
    assert EFFICIENCY not in goals
    assert goal_metrics("rmse:min") == ["rmse"]


def test_report_has_the_panels_of_the_view(capsys: pytest.CaptureFixture[str]) -> None:
    """Each section has a heading and a grid, between a question and an answer."""
    main(["me/project", "--dry-run"])
    view = panels(json.loads(capsys.readouterr().out))
    main(["me/project", "--name", "Mine", "--report", "--dry-run"])
    report = json.loads(capsys.readouterr().out)
    assert (report["displayName"], report["project"]["entityName"]) == ("Mine", "me")
    blocks = report["spec"]["blocks"]
    headings = [block["children"][0]["text"] for block in blocks if block["type"] == "heading"]
    assert headings[:3] == ["Question", "How the runs differ", "At the end"]
    assert headings[-1] == "Answer"
    grids = [block["metadata"] for block in blocks if block["type"] == "panel-grid"]
    assert len(grids) == len(headings) - 2
    report_panels = [panel for grid in grids for panel in grid["panelBankSectionConfig"]["panels"]]
    assert [panel["config"] for panel in report_panels[1:]] == [panel["config"] for panel in view]


def test_missing_key_gives_one_sentence() -> None:
    """The sentence names the flag that needs no account."""
    with pytest.raises(UserError, match=r"no API key.*--dry-run"):
        main(["me/project"])


@pytest.mark.parametrize("project", ["project", "me/project/run", "https://wandb.ai/me/project"])
def test_project_without_its_entity_is_refused(project: str) -> None:
    """The message shows the form ENTITY/PROJECT."""
    with pytest.raises(UserError, match="ENTITY/PROJECT"):
        main([project, "--dry-run"])


def test_view_is_sent_to_wandb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's address is printed. A refusal gives one sentence."""
    sent: list[Any] = []

    def upsert(view: Any) -> dict[str, Any]:
        if view.project == "missing":
            raise ValueError("project not found")
        sent.append(view)
        return {"upsertView": {"view": {"name": "nw-abc-v", "id": "1"}}}

    monkeypatch.setattr(
        "common.track.trackers.wandb_environment.wandb_mode",
        lambda: ("online", "https://api.wandb.ai"),
    )
    monkeypatch.setattr("wandb_workspaces.workspaces.internal.upsert_view2", upsert)
    interface = "wandb_workspaces.workspaces.interface"
    monkeypatch.setattr(f"{interface}.get_app_url", lambda api: "https://w.ai")
    monkeypatch.setattr("wandb.Api", lambda: SimpleNamespace())
    main(["me/project"])
    assert [view.project for view in sent] == ["project"]
    assert "saved: https://w.ai/me/project?nw=abc" in capsys.readouterr().out
    with pytest.raises(UserError, match="project not found"):
        main(["me/missing"])
