"""When trainings are killed. This module imports no library."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.resume.schedule import SAVE_EVERY, UPDATES, UPDATES_PER_EPOCH
from benchmarks.resume.stopping import missed_share

UNINTERRUPTED = "none"
DURING_A_SAVE = "during a save"
TWICE = "twice"
# What each moment tests, in the order of the tables.
MOMENTS = {
    UNINTERRUPTED: "not killed: the same command a second time",
    "between saves": "in the middle of an epoch, some updates after the last save",
    "after a save": "in the middle of an epoch, one update after a save",
    DURING_A_SAVE: "in the middle of an epoch, after a share of the checkpoint's bytes",
    "save at the epoch's end": "one update after a save at the end of an epoch",
    "epoch's end": "after the last update of an epoch, some updates after the last save",
    TWICE: "between saves, and again in a later epoch",
}
WITH_TWO_PROCESSES = (UNINTERRUPTED, "between saves", DURING_A_SAVE, "save at the epoch's end")
SAVES = range(SAVE_EVERY, UPDATES, SAVE_EVERY)
# Saves in the middle of an epoch: the next update belongs to the same epoch.
MID_EPOCH_SAVES = [save for save in SAVES if save % UPDATES_PER_EPOCH != 0]


@dataclass(frozen=True)
class Kill:
    """The kills of one training: after these updates, or in a save."""

    updates: tuple[int, ...] = ()  # each training process has recorded this update
    # Not None: the save after this update is under way, and about this share of a checkpoint's
    # bytes is on the disk.
    share: float | None = None

    @property
    def label(self) -> str:
        """Return the kill as `--kills` takes it: none, 29, 27+63 or 24@0.50."""
        if not self.updates:
            return UNINTERRUPTED
        label = "+".join(map(str, self.updates))
        return label if self.share is None else f"{label}@{self.share:.2f}"

    @property
    def moment(self) -> str:
        """Return the name of the moment, a key of `MOMENTS`."""
        if not self.updates:
            return UNINTERRUPTED
        if len(self.updates) > 1:
            return TWICE
        if self.share is not None:
            return DURING_A_SAVE
        (update,) = self.updates
        last_save = update - update % SAVE_EVERY
        if last_save == update - 1:
            is_at_end = last_save % UPDATES_PER_EPOCH == 0
            return "save at the epoch's end" if is_at_end else "after a save"
        return "epoch's end" if update % UPDATES_PER_EPOCH == 0 else "between saves"

    def missed(self, written_shares: Sequence[float]) -> bool:
        """Whether a training with this kill was killed with another share on the disk.

        Args:
            written_shares: those that were on the disk, one for each kill in a save.
        """
        if self.share is None:
            return False
        return not written_shares or missed_share(self.share, written_shares[-1])

    @classmethod
    def parse(cls, label: str) -> Kill:
        """Return the kill of a label.

        Raises:
            ValueError: the label is none, or names an update that can't be killed and resumed.
        """
        if label == UNINTERRUPTED:
            return cls()
        numbers, separator, share = label.partition("@")
        kill = cls(
            tuple(int(number) for number in numbers.split("+")),
            float(share) if separator else None,
        )
        refuse_impossible(kill)
        return kill


def refuse_impossible(kill: Kill) -> None:
    """Raise a `ValueError` if a training can't be killed like this and resumed."""
    if list(kill.updates) != sorted(set(kill.updates)):
        raise ValueError("updates must rise")
    if kill.updates[0] < SAVE_EVERY or kill.updates[-1] >= UPDATES:
        raise ValueError(f"updates must be from {SAVE_EVERY}, the first save, to {UPDATES - 1}")
    if kill.share is None:
        return
    if len(kill.updates) > 1 or kill.updates[0] % SAVE_EVERY != 0:
        raise ValueError(f"a share needs one update that is a multiple of {SAVE_EVERY}")
    if not 0 < kill.share < 1:
        raise ValueError("a share must be between 0 and 1")


def between_saves_in(epochs: range) -> list[int]:
    """Return the updates in these epochs that are two or more after a save in their own epoch."""
    return [
        save + later
        for save in MID_EPOCH_SAVES
        if save // UPDATES_PER_EPOCH in epochs
        for later in range(2, SAVE_EVERY)
        # The next update is in the same epoch, too.
        if (save + later) // UPDATES_PER_EPOCH == save // UPDATES_PER_EPOCH
    ]


def drawn_kill(moment: str, random_numbers: random.Random) -> Kill:
    """Draw a kill at a moment, a key of `MOMENTS`."""
    last_epoch = UPDATES // UPDATES_PER_EPOCH - 1
    if moment == "between saves":
        return Kill((random_numbers.choice(between_saves_in(range(1, last_epoch + 1))),))
    if moment == "after a save":
        return Kill((random_numbers.choice(MID_EPOCH_SAVES) + 1,))
    if moment == DURING_A_SAVE:
        # Never the first save, so that an earlier checkpoint exists.
        save = random_numbers.choice(MID_EPOCH_SAVES[1:])
        return Kill((save,), round(random_numbers.uniform(0.05, 0.95), 2))
    if moment == "save at the epoch's end":
        saves = [save for save in SAVES if save % UPDATES_PER_EPOCH == 0]
        return Kill((random_numbers.choice(saves) + 1,))
    if moment == "epoch's end":
        ends = range(UPDATES_PER_EPOCH, UPDATES, UPDATES_PER_EPOCH)
        return Kill((random_numbers.choice([end for end in ends if end % SAVE_EVERY != 0]),))
    if moment == TWICE:
        first = random_numbers.choice(between_saves_in(range(1, 2)))
        second = random_numbers.choice(between_saves_in(range(2, last_epoch + 1)))
        return Kill((first, second))
    return Kill()


def drawn_kills(moment: str, seed: int, draws: int) -> list[Kill]:
    """Draw different kills at a moment; fewer than `draws` if there are not so many."""
    random_numbers = random.Random(f"{seed} {moment}")
    kills: dict[Kill, None] = {}
    for _ in range(20 * draws):
        if len(kills) < draws:
            kills[drawn_kill(moment, random_numbers)] = None
    return list(kills)
