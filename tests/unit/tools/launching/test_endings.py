"""How the end of a launched process is described."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.tools.launching.endings import ending_in_words


@pytest.mark.parametrize(
    ("status", "output", "words"),
    [
        (1, "begins\nerror: no such data\nends\n", "status 1: no such data (LOG has all of it)"),
        (-9, "about to die\n", "ended by SIGKILL: about to die (LOG has all of it)"),
        (1, "\n", "status 1, and it printed nothing"),
    ],
)
def test_ending_has_the_last_words(status: int, output: str, words: str, tmp_path: Path) -> None:
    """A log without output has nothing more to show, so it is not named."""
    log = tmp_path / "run.log"
    log.write_text(output)
    assert ending_in_words(status, log) == words.replace("LOG", str(log))
