"""Counts the updates that were skipped, because a gradient of a network was not finite."""

import math

import torch

# The norms are read once this many are unread, even if no log line is due. Each update adds one
# norm for each network. The number must be well below 166, because 166 overflows in a row halve
# the loss scale of fp16 to 0.
MAX_UNREAD_NORMS = 100


class SkippedUpdates:
    """Counts skipped updates by the gradient norms of each network.

    The norms stay on the device until `count` reads them, so that no update waits for the device.

    Networks are numbered in the order in which they were first clipped, so a resumed run gives them
    the same numbers. Each network has its own count of updates in a row: one network of several
    may overflow in each update while the others are healthy.
    """

    def __init__(self) -> None:
        self.total = 0  # of all networks
        self.in_a_row: list[int] = []  # for each network, by its number
        # The norm of each network that was clipped in this update, by its number.
        self.norms_of_update: dict[int, torch.Tensor] = {}
        # Norms of earlier updates that nobody has read yet, each with the number of its network.
        self.unread_norms: list[tuple[int, torch.Tensor]] = []

    def add_network(self, number: int) -> None:
        """Count the updates of a further network from now on.

        After a resume, the checkpoint may have its count already.
        """
        if number >= len(self.in_a_row):
            self.in_a_row.append(0)

    def note_norm(self, number: int, norm: torch.Tensor) -> bool:
        """Keep the norm of a network; return whether this is its first one in this update.

        If one of several norms is not finite, the one that is kept is not finite either.
        """
        earlier = self.norms_of_update.get(number)
        self.norms_of_update[number] = norm if earlier is None else torch.maximum(earlier, norm)
        return earlier is None

    def end_update(self) -> None:
        """End an update: the next norm of a network belongs to the next update."""
        self.unread_norms.extend(self.norms_of_update.items())
        self.norms_of_update.clear()

    @property
    def is_count_due(self) -> bool:
        """Whether `count` should be called even though no log line is due."""
        return len(self.unread_norms) >= MAX_UNREAD_NORMS

    def count(self) -> None:
        """Read the norms that are still on the device, and count the skipped updates among them."""
        self.end_update()
        if not self.unread_norms:
            return
        numbers = [number for number, _ in self.unread_norms]
        norms = torch.stack([norm for _, norm in self.unread_norms]).tolist()
        self.unread_norms.clear()
        for number, norm in zip(numbers, norms, strict=True):
            if math.isfinite(norm):
                self.in_a_row[number] = 0
            else:
                self.total += 1
                self.in_a_row[number] += 1
