"""Panels of a W&B project: `python -m common.tools.workspace ENTITY/PROJECT [--report]`.

A saved view of the project, or a report to write in, has what `common.track.names` has, of all runs
over `progress/global_step`. Saving needs an account, with which it could not be tried; `--dry-run`
prints what would be saved, built from the objects of package wandb-workspaces, and needs none.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from common.command_line import tool_parser
from common.console import say
from common.errors import UserError
from common.objective import Objective
from common.tools.compare.readers import asking_wandb
from common.track.names import METRICS, SPLITS, STEP, describe

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2 import Report
    from wandb_workspaces.workspaces import Workspace

# Bars of each run's last value, beside the lines: a comparison at a glance.
BARS = ("perf/samples_per_second", "memory/peak_allocated_mib")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = tool_parser("common.tools.workspace", __doc__)
    parser.add_argument("project", metavar="ENTITY/PROJECT")
    parser.add_argument("--name", default="Recipes side by side", help="of the view or report")
    parser.add_argument("--objective", metavar="METRIC:max", help="of the runs, if not a recipe's")
    parser.add_argument("--report", action="store_true", help="a report instead of a view")
    parser.add_argument("--dry-run", action="store_true", help="print it as JSON, save nothing")
    given = parser.parse_args(arguments)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", given.project):
        raise UserError(f"{given.project} is no W&B project: pass ENTITY/PROJECT")
    goals = [name for name, metric in METRICS.items() if "/" not in name and metric.better == "max"]
    if given.objective is not None:
        goals = [Objective.parse(given.objective).metric]
    entity, project = given.project.split("/")
    build = build_report if given.report else build_view
    built = build(entity, project, given.name, goals)
    if given.dry_run:
        model = built._to_model()  # there is no public way to see what would be sent
        print(model.model_dump_json(by_alias=True, exclude_none=True, indent=2))
        return
    advice = "Log in by wandb login, or print it with --dry-run"
    kind = "report" if given.report else "view"
    with asking_wandb(f"W&B does not take a {kind} of {given.project}", advice):
        built.save()
    say(f"saved: {built.url}")


def panels(goals: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Return the metrics of each panel, by title of its section and its own."""
    found: dict[str, dict[str, list[str]]] = {}
    for name in dict.fromkeys([*goals, *METRICS]):
        metric = describe(name)
        if metric.panel:
            names = [name] if "/" in name else [f"{split}/{name}" for split in SPLITS]
            found.setdefault(metric.panel, {})[metric.heading] = names
    return found


def drawn(goals: Sequence[str]) -> dict[str, list[Any]]:
    """Return W&B's panels by title of their section."""
    import wandb_workspaces.reports.v2 as reports

    ends = [*(f"val/best_{goal}" for goal in goals), *BARS]
    bars = [reports.BarPlot(title=describe(metric).heading, metrics=[metric]) for metric in ends]
    sections: dict[str, list[Any]] = {"At the end": bars}
    for title, lines in panels(goals).items():
        sections[title] = [
            reports.LinePlot(title=heading, x=STEP, y=[*names]) for heading, names in lines.items()
        ]
    return sections


def build_view(entity: str, project: str, name: str, goals: Sequence[str]) -> "Workspace":
    """Return the view, not yet saved; `goals` may be runs' objectives."""
    import wandb_workspaces.workspaces as workspaces

    ends = [f"{split}{goal}" for split in ("val/best_", "test/") for goal in goals]
    columns = [f"summary:{metric}" for metric in (*ends, BARS[0])]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            workspaces.Section(name=title, is_open=True, panels=held)
            for title, held in drawn(goals).items()
        ],
        settings=workspaces.WorkspaceSettings(x_axis=STEP),
        runset_settings=workspaces.RunsetSettings(pinned_columns=columns),
    )


def build_report(entity: str, project: str, name: str, goals: Sequence[str]) -> "Report":
    """Return a report, not yet saved: what was asked, how runs differ, the panels, the answer."""
    import wandb_workspaces.reports.v2 as reports

    sections = {"How the runs differ": [reports.RunComparer(diff_only="split")], **drawn(goals)}
    blocks: list[Any] = [reports.H2("Question"), reports.P("What should these runs tell?")]
    for title, held in sections.items():
        blocks += [reports.H2(title), reports.PanelGrid(panels=held)]
    blocks += [reports.H2("Answer"), reports.P("What they tell, and what to try next.")]
    return reports.Report(entity=entity, project=project, title=name, blocks=blocks)


if __name__ == "__main__":
    main()
