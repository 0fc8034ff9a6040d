"""Set up a view of a W&B project with panels for every metric of these recipes, or a report.

Each panel shows all runs over progress/global_step. Saving needs a W&B account; it has been tested
only with a stand-in for W&B's server. --dry-run prints what would be saved, and needs no account.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.console import say
from common.errors import UserError
from common.metric_names import PEAK_ALLOCATED, STEP, THROUGHPUT
from common.objective import Objective
from common.tools.compare.readers.wandb_runs import using_wandb
from common.tools.parser import tool_parser
from common.track.names import METRICS, SPLITS, metric_named

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2 import Report
    from wandb_workspaces.reports.v2.interface import BlockTypes, PanelTypes
    from wandb_workspaces.workspaces import Workspace

    Panels = dict[str, list[PanelTypes]]  # the panels of each section, by the section's title

# Besides the lines over steps, these metrics get a bar for each run's last value.
BARS = (THROUGHPUT, PEAK_ALLOCATED)


def main(words: Sequence[str] | None = None) -> None:
    """Save the view or the report that the command line asks for; with ``--dry-run``, print it.

    The page shows the objective of the runs as a bar chart and as a column of the table. Without
    ``--objective``, the page shows the metrics of this repository that should be high; see
    `goal_metrics`. The flag is for runs with another objective: a metric of a copied recipe, or a
    metric that should be low.

    Raises:
        UserError: the address is malformed, or W&B does not take the page.
    """
    parser = tool_parser("workspace", __doc__, "%(prog)s ENTITY/PROJECT [options]")
    parser.add_argument("project", metavar="ENTITY/PROJECT", help="at W&B")
    parser.add_argument("--name", default="Recipes side by side", help="name of the view or report")
    parser.add_argument(
        "--objective",
        metavar="METRIC:max",
        help="objective of the runs, if a copied recipe has another one, such as rmse:min",
    )
    parser.add_argument("--report", action="store_true", help="make a report instead of a view")
    parser.add_argument("--dry-run", action="store_true", help="print it as JSON, save nothing")
    arguments = parser.parse_args(words)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", arguments.project):
        raise UserError(
            f"{arguments.project} is not the address of a W&B project",
            advice="pass ENTITY/PROJECT, such as my-team/my-project",
        )
    entity, project = arguments.project.split("/")
    build = build_report if arguments.report else build_view
    page = build(entity, project, arguments.name, goal_metrics(arguments.objective))
    if arguments.dry_run:
        contents = page._to_model()  # there is no public way to see what would be sent
        print(contents.model_dump_json(by_alias=True, exclude_none=True, indent=2))
        return
    page_type = "report" if arguments.report else "view"
    advice = (
        "check the name, the connection and the login (wandb login), or print it with --dry-run"
    )
    with using_wandb(f"W&B does not take a {page_type} of {arguments.project}", advice):
        page.save()
    say(f"saved: {page.url}")


def goal_metrics(objective: str | None) -> list[str]:
    """Return the metrics, without their split, that get a bar and a column as objectives.

    Args:
        objective: an objective such as ``rmse:min``. None stands for every metric of the
            evaluations that should be high, because any such metric may be an objective of the
            project's runs.
    """
    if objective is not None:
        return [Objective.parse(objective).metric]
    goals = []
    for name, metric in METRICS.items():
        # Metrics of evaluations are listed without their split, so their names have no slash. A
        # metric without a panel, such as the scaling efficiency, is not from an evaluation.
        is_of_evaluations = "/" not in name and metric.panel
        if is_of_evaluations and metric.better == "max":
            goals.append(name)
    return goals


def metrics_of_panels(goals: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Return the names of the metrics that each line panel shows.

    The outer key is the title of the panel's section, the inner key is the panel's own title. A
    metric that splits share has one panel with a line for each split.

    Args:
        goals: the metrics to list first, without their split. A recipe's own metric has a panel
            only if it is one of them.
    """
    sections: dict[str, dict[str, list[str]]] = {}
    for name in dict.fromkeys([*goals, *METRICS]):  # without repetitions
        metric = metric_named(name)
        if metric.panel:  # otherwise the metric has no chart
            # A metric that splits share is listed without a split, so its name has no slash.
            names = [name] if "/" in name else [f"{split}/{name}" for split in SPLITS]
            sections.setdefault(metric.panel, {})[metric.heading] = names
    return sections


def panel_objects(goals: Sequence[str]) -> "Panels":
    """Return W&B's panels by the title of their section: bars first, then lines over steps.

    Args:
        goals: metrics that may be the runs' objectives, without their split.
    """
    import wandb_workspaces.reports.v2 as reports

    bar_metrics = [*(f"val/best_{goal}" for goal in goals), *BARS]
    bars = [
        reports.BarPlot(title=metric_named(name).heading, metrics=[name]) for name in bar_metrics
    ]
    # The lists are copied for mypy: a list of one type of panel is not a list of several types.
    sections: Panels = {"At the end": [*bars]}
    for title, lines in metrics_of_panels(goals).items():
        sections[title] = [
            reports.LinePlot(title=heading, x=STEP, y=[*names]) for heading, names in lines.items()
        ]
    return sections


def build_view(entity: str, project: str, name: str, goals: Sequence[str]) -> "Workspace":
    """Return a view that is not saved yet.

    Args:
        entity: owner of the project at W&B.
        project: name of the project.
        name: name of the view.
        goals: metrics that may be the runs' objectives, without their split.
    """
    import wandb_workspaces.workspaces as workspaces

    # The columns are the objectives' best and final values, and the throughput.
    final_metrics = [f"{prefix}{goal}" for prefix in ("val/best_", "test/") for goal in goals]
    columns = [f"summary:{metric}" for metric in (*final_metrics, THROUGHPUT)]
    sections = [
        workspaces.Section(name=title, is_open=True, panels=section_panels)
        for title, section_panels in panel_objects(goals).items()
    ]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis=STEP),
        runset_settings=workspaces.RunsetSettings(pinned_columns=columns),
    )


def build_report(entity: str, project: str, name: str, goals: Sequence[str]) -> "Report":
    """Return a report that is not saved yet: a question, the runs' differences, panels, an answer.

    The arguments are those of `build_view`. Question and answer are for the user to write; the
    texts here only mark their places.
    """
    import wandb_workspaces.reports.v2 as reports

    comparer = reports.RunComparer(diff_only="split")  # leaves out what all runs share
    sections: Panels = {"How the runs differ": [comparer], **panel_objects(goals)}
    blocks: list[BlockTypes] = [reports.H2("Question"), reports.P("What should these runs tell?")]
    for title, section_panels in sections.items():
        blocks += [reports.H2(title), reports.PanelGrid(panels=section_panels)]
    blocks += [reports.H2("Answer"), reports.P("What they tell, and what to try next.")]
    return reports.Report(entity=entity, project=project, title=name, blocks=blocks)
