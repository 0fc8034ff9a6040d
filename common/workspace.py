"""Build a saved view of a W&B project: `python -m common.workspace ENTITY/PROJECT`.

Its panels show throughput, memory, loss and accuracy of all runs over `progress/global_step`.
Saving needs an account, with which it could not be tried; `--dry-run` prints what would be saved,
built from the objects of package wandb-workspaces, and needs none.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from common.console import say
from common.errors import UserError
from common.wandb_reader import is_address

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

X_AXIS = "progress/global_step"
# Sections of the view; in each, panels by title, with their metrics.
SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "Learning": {
        "Loss": ("train/loss", "eval/loss"),
        "Accuracy": ("train/accuracy", "eval/accuracy"),
        "F1": ("eval/f1",),
        "Learning rate": ("train/learning_rate",),
        "Gradient norm": ("train/grad_norm",),
        "Loss scale and skipped updates": ("train/loss_scale", "train/skipped_updates"),
    },
    "Throughput": {
        "Samples per second": ("perf/samples_per_second",),
        "Tokens per second": ("perf/tokens_per_second",),
        "Milliseconds per update": ("perf/step_milliseconds",),
        "Share of time waiting for data": ("perf/data_wait_fraction",),
        "MFU": ("perf/mfu",),
        "Goodput": ("perf/goodput",),
    },
    "Memory": {
        "Peak allocated, MiB": ("memory/peak_allocated_mib",),
        "Peak reserved, MiB": ("memory/peak_reserved_mib",),
        "Host RSS, MiB": ("memory/host_rss_mib",),
    },
    "Energy": {
        "GPU utilisation, %": ("gpu/utilization",),
        "GPU power, W": ("gpu/power_watts",),
        "Joules per sample": ("perf/joules_per_sample",),
    },
}
# Bars of each run's last value: a comparison at a glance.
BARS = {
    "Learning": {"Best validation accuracy": "eval/best_accuracy"},
    "Throughput": {"Samples per second, whole run": "perf/samples_per_second"},
    "Memory": {"Peak allocated, MiB, whole run": "memory/peak_allocated_mib"},
}
COLUMNS = ("eval/best_accuracy", "eval/accuracy", "perf/samples_per_second")


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the view that the command line asks for, and save or print it.

    Raises:
        UserError: for what is no project, or when W&B does not take the view.
    """
    parser = argparse.ArgumentParser(
        prog="python -m common.workspace",
        description="Build a saved view of a W&B project for the runs of these recipes.",
        allow_abbrev=False,
    )
    parser.add_argument("project", metavar="ENTITY/PROJECT")
    parser.add_argument("--name", default="Recipes side by side", help="of the view")
    parser.add_argument("--dry-run", action="store_true", help="print it as JSON, save nothing")
    given = parser.parse_args(arguments)
    if not is_address(given.project) or given.project.count("/") != 1:
        raise UserError(f"{given.project} is no W&B project: pass ENTITY/PROJECT")
    if not given.dry_run:
        check_account()
    workspace = build_workspace(given.project, given.name)
    if given.dry_run:
        print(json.dumps(as_json(workspace), indent=2))
    else:
        save(workspace)


def check_account() -> None:
    """See that W&B can be reached with a key.

    Raises:
        UserError: saying what is missing.
    """
    from common.tracking import wandb_mode

    mode, reason = wandb_mode()
    if mode != "online":
        raise UserError(
            f"a view is saved at W&B, and that is out of reach: {reason}. Log in by wandb login, "
            "or print the view with --dry-run"
        )


def build_workspace(project: str, name: str) -> Workspace:
    """Return the view of ``entity/project``, not yet saved."""
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    def section(title: str) -> workspaces.Section:
        lines = SECTIONS[title].items()
        bars = BARS.get(title, {}).items()
        return workspaces.Section(
            name=title,
            is_open=True,
            panels=[
                *(reports.LinePlot(title=t, x=X_AXIS, y=list(metrics)) for t, metrics in lines),
                *(reports.BarPlot(title=t, metrics=[metric]) for t, metric in bars),
            ],
            panel_settings=workspaces.SectionPanelSettings(x_axis=X_AXIS),
        )

    entity, project_name = project.split("/")
    return workspaces.Workspace(
        entity=entity,
        project=project_name,
        name=name,
        sections=[section(title) for title in SECTIONS],
        settings=workspaces.WorkspaceSettings(x_axis=X_AXIS),
        runset_settings=workspaces.RunsetSettings(
            pinned_columns=[f"summary:{metric}" for metric in COLUMNS]
        ),
    )


def as_json(workspace: Workspace) -> dict[str, Any]:
    """Return what would be sent to W&B."""
    # The package has no public way to see it without sending it.
    return workspace._to_model().model_dump(mode="json", by_alias=True, exclude_none=True)


def save(workspace: Workspace) -> None:
    """Save the view at W&B, and say where.

    Raises:
        UserError: when W&B does not take it.
    """
    import wandb

    try:
        workspace.save()
    except (wandb.Error, ValueError, OSError) as problem:
        said = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise UserError(
            f"W&B does not take a view of {workspace.entity}/{workspace.project}: {said}"
        ) from None
    say(f"saved: {workspace.url}")


if __name__ == "__main__":
    main()
