"""Build a saved view of a W&B project: `python -m common.compare.view ENTITY/PROJECT`.

Its panels show what `common.track.names` has, of all runs over `progress/global_step`. Saving
needs an account, with which it could not be tried; `--dry-run` prints what would be saved, built
from the objects of package wandb-workspaces, and needs none.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from common.command_line import tool_parser
from common.compare.readers import asking_wandb
from common.console import say
from common.errors import UserError
from common.objective import Objective
from common.track.names import METRICS, SPLITS, STEP, describe

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

# Bars of each run's last value, beside the lines: a comparison at a glance.
BARS = ("perf/samples_per_second", "memory/peak_allocated_mib")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = tool_parser("common.compare.view", __doc__)
    parser.add_argument("project", metavar="ENTITY/PROJECT")
    parser.add_argument("--name", default="Recipes side by side", help="of the view")
    parser.add_argument("--objective", metavar="METRIC:max", help="of the runs, if not a recipe's")
    parser.add_argument("--dry-run", action="store_true", help="print it as JSON, save nothing")
    given = parser.parse_args(arguments)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", given.project):
        raise UserError(f"{given.project} is no W&B project: pass ENTITY/PROJECT")
    goals = [name for name, metric in METRICS.items() if "/" not in name and metric.better == "max"]
    if given.objective is not None:
        goals = [Objective.parse(given.objective).metric]
    workspace = build_workspace(given.project, given.name, goals)
    if given.dry_run:
        model = workspace._to_model()  # there is no public way to see what would be sent
        print(model.model_dump_json(by_alias=True, exclude_none=True, indent=2))
        return
    advice = "Log in by wandb login, or print the view with --dry-run"
    with asking_wandb(f"W&B does not take a view of {given.project}", advice):
        workspace.save()
    say(f"saved: {workspace.url}")


def panels(goals: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Return the metrics of each panel, by title of its section and its own."""
    found: dict[str, dict[str, list[str]]] = {}
    for name in dict.fromkeys([*goals, *METRICS]):
        metric = describe(name)
        if metric.panel:
            names = [name] if "/" in name else [f"{split}/{name}" for split in SPLITS]
            found.setdefault(metric.panel, {})[metric.heading] = names
    return found


def build_workspace(project: str, name: str, goals: Sequence[str]) -> "Workspace":
    """Return the view of ``entity/project``, not yet saved; `goals` may be runs' objectives."""
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    entity, project_name = project.split("/")
    best = [f"val/best_{goal}" for goal in goals]
    bars: list[Any] = [
        reports.BarPlot(title=describe(metric).heading, metrics=[metric])
        for metric in (*best, *BARS)
    ]
    sections = [workspaces.Section(name="At the end", is_open=True, panels=bars)]
    for title, lines in panels(goals).items():
        drawn: list[Any] = [reports.LinePlot(title=n, x=STEP, y=[*y]) for n, y in lines.items()]
        sections.append(workspaces.Section(name=title, is_open=True, panels=drawn))
    columns = [f"summary:{m}" for m in (*best, *(f"test/{goal}" for goal in goals), BARS[0])]
    return workspaces.Workspace(
        entity=entity,
        project=project_name,
        name=name,
        sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis=STEP),
        runset_settings=workspaces.RunsetSettings(pinned_columns=columns),
    )


if __name__ == "__main__":
    main()
