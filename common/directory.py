"""A run's directory: `config.json`, `status.json` and what else is written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from common.errors import UserError, is_main_rank


class RunDirectory:
    """The files of one run; rank 0 alone writes them."""

    def __init__(self, asked: str | None, recipe: str) -> None:
        """Create the directory: `asked`, or one named by recipe and time, chosen by rank 0.

        Raises:
            UserError: when it can't be made, or holds a run already, which is kept.
        """
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        chosen = [asked or f"runs/{recipe}-{stamp}"]
        broadcast_object_list(chosen)
        self.path = Path(chosen[0])
        self.named_by_clock = asked is None
        if (self.path / "config.json").exists():
            raise UserError(f"--output-dir {self.path} holds a run, which is kept: name another")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise UserError(f"--output-dir {self.path} can't be made: {problem}") from None

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace a JSON file whole, so that a reader never meets half of one."""
        if not is_main_rank():
            return
        temporary = self.path / f".{name}.{os.getpid()}"
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, self.path / name)

    def write_status(self, status: str, global_step: int, reason: str | None = None) -> None:
        """Say in `status.json` how the run stands, for supervisors."""
        value = {"status": status, "reason": reason, "global_step": global_step}
        self.write("status.json", value)

    def remove_if_unused(self) -> None:
        """Remove a directory that was named by the clock, if the run ended before it began."""
        names = {path.name for path in self.path.glob("*")}
        if is_main_rank() and self.named_by_clock and names == {"status.json"}:
            (self.path / "status.json").unlink()
            self.path.rmdir()


def json_safe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace what JSON has no word for: NaN and infinities become null."""
    return {
        name: None if isinstance(value, float) and value - value != 0 else value
        for name, value in values.items()
    }
