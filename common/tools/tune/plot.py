"""Draw a search: the trials' results and curves, the values they tried, which flags mattered."""

import warnings
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from optuna.study import Study
from optuna.trial import TrialState
from optuna.visualization import matplotlib as plots
from PIL import Image

from common.failures.sentences import writing

MIN_TRIALS = 4  # with fewer finished trials, Optuna can't tell which flags mattered
ROW_SIZE = (13, 4.5)  # inches
DOTS_PER_INCH = 100


def plot_search(study: Study, metric: str, file: Path) -> None:
    """Write one picture with Optuna's plots of a study below each other.

    Optuna draws each plot into a figure of its own, so their pixels are stacked into one picture.

    Args:
        study: a study with at least one finished trial.
        metric: the heading of the objective's metric.
        file: the picture's path, whose suffix is the format.

    Raises:
        UserError: the file can't be written.
    """
    matplotlib.use("Agg")  # a backend that needs no display
    # Optuna changes matplotlib's style, which the context restores.
    with pyplot.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna warns that these plots are experimental
        curves = plots.plot_intermediate_values(study)
        curves.set(xlabel="hundredths of an epoch", ylabel=metric)
        all_axes: list[Axes | np.ndarray] = [
            plots.plot_optimization_history(study, target_name=metric),
            curves,
            plots.plot_slice(study, target_name=metric),
        ]
        if shows_importances(study):
            all_axes.append(plots.plot_param_importances(study, target_name=metric))
        rows = [drawn_pixels(figure_of(axes)) for axes in all_axes]
    with writing(str(file)):
        Image.fromarray(np.vstack(rows)).save(file)


def shows_importances(study: Study) -> bool:
    """Return whether the trials can tell which flags mattered.

    That takes at least `MIN_TRIALS` finished trials, different results, and several flags.
    """
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    has_different_results = len({trial.value for trial in finished}) > 1
    return len(finished) >= MIN_TRIALS and has_different_results and len(finished[0].params) > 1


def figure_of(plot: Axes | np.ndarray) -> Figure:
    """Return the figure that Optuna drew a plot in.

    Args:
        plot: the plot's axes, or an array of axes if it has several.
    """
    axes: Axes = plot.flat[0] if isinstance(plot, np.ndarray) else plot
    figure = axes.figure
    assert isinstance(figure, Figure)
    return figure


def drawn_pixels(figure: Figure) -> np.ndarray:
    """Draw a figure at the common size, close it, and return it as uint8 [height, width, 4]."""
    figure.set(size_inches=ROW_SIZE, dpi=DOTS_PER_INCH)
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()
    pixels = np.array(canvas.buffer_rgba())
    pyplot.close(figure)
    return pixels
