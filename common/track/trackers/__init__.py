"""The trackers that show a run besides its own files.

To add one, write a subclass of `Tracker` in a module of its own, name it in `TRACKERS`, and add the
name to `tracker` in `common/config.py`.
"""

from common.track.trackers.tensorboard_tracker import TensorBoardTracker
from common.track.trackers.tracker import Tracker
from common.track.trackers.trackio_tracker import TrackioTracker
from common.track.trackers.wandb_tracker import WandbTracker

# The trackers by the value of `--tracker`. A run imports the package of its own tracker only.
TRACKERS: dict[str, type[Tracker]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorBoardTracker,
    "trackio": TrackioTracker,
}
