"""Draw a search: what trials reached, how each got there, where good values lie, what mattered."""

import warnings
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot
from optuna.study import Study
from optuna.trial import TrialState
from optuna.visualization import matplotlib as plots
from PIL import Image

from common.files import writing

FEWEST = 4  # finished trials from which one may guess what mattered


def plot_search(study: Study, metric: str, file: Path) -> None:
    """Write a picture of what `metric` the trials reached; Optuna draws each row as a figure."""
    matplotlib.use("Agg")
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    values = {trial.value for trial in finished}
    tells = len(finished) >= FEWEST and len(values) > 1 and len(finished[0].params) > 1
    rows = []
    with pyplot.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these plots are experimental, says Optuna
        drawn: list[Any] = [
            plots.plot_optimization_history(study, target_name=metric),
            plots.plot_intermediate_values(study),
            plots.plot_slice(study, target_name=metric),
            *([plots.plot_param_importances(study, target_name=metric)] if tells else []),
        ]
        drawn[1].set(xlabel="hundredths of an epoch", ylabel=metric)
        for axes in drawn:
            figure = np.ravel(axes)[0].figure
            figure.set(size_inches=(13, 4.5), dpi=100)
            figure.canvas.draw()
            rows.append(np.asarray(figure.canvas.buffer_rgba()))
            pyplot.close(figure)
    with writing(str(file)):
        Image.fromarray(np.vstack(rows)).save(file)
