"""Take the README's pictures of a terminal: a run as it trains, and a comparison of two.

python benchmarks/pictures.py --output docs

Runs what the pictures show in a terminal of 100 columns, and draws what stood in it as SVG.
"""

import argparse
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
from fcntl import ioctl
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH, HEIGHT = 100, 30
TRAIN = "accelerate launch recipes/mnist_mlp.py --dataset digits --validation-share 0.1"
RUNS = {"fp32": "--mixed-precision no", "bf16": "--mixed-precision bf16"}
COMPARE = "recipes compare runs/fp32 runs/bf16"
MOVES = re.compile(r"(\r|\n|\x1b\[\d*[A-HJKa-ln-z]|\x1b\[\?\d+[hl])")  # all but colours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("docs"), metavar="DIR")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        for name in ("recipes", "common"):
            (Path(place) / name).symlink_to(Path(name).resolve())
        for name, flags in RUNS.items():
            command = f"{TRAIN} {flags}"
            written = written_by(f"{command} --tracker none --output-dir runs/{name}", place)
        training = written[: written.rindex("━")]  # until the bar is taken away
        end = training.rindex("\x1b[2K", 0, len(training) * 4 // 5)  # before a line is redrawn
        draw(command, training[:end], folder / "terminal.svg")
        draw(COMPARE, written_by(COMPARE, place), folder / "comparison.svg")


def written_by(command: str, folder: str) -> str:
    """Return all that a command has written to its terminal."""
    control, terminal = pty.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    words = shlex.split(command)
    if words[0] == "accelerate":
        words = ["python", "-m", "accelerate.commands.accelerate_cli", *words[1:]]
    process = subprocess.Popen(
        [sys.executable, *words[1:]],
        cwd=folder,
        env={**os.environ, "TERM": "xterm-256color"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    written = b"".join(iter(lambda: read(control), b"")).decode(errors="replace")
    if process.wait():
        raise SystemExit(f"{command} failed:\n{screen_of(written)}")
    return written


def read(control: int) -> bytes:
    try:
        return os.read(control, 65536)
    except OSError:  # how Linux says that the last one closed the terminal
        return b""


def screen_of(written: str) -> str:
    """Return lines as rich has written them: it goes up and begins whole lines anew."""
    lines, row = [""], 0
    for part in MOVES.split(written):
        if part == "\n":
            row += 1
        elif part.startswith("\x1b[") and part.endswith("A"):
            row = max(0, row - int(part[2:-1] or 1))
        elif part == "\x1b[2K" or part == "\r":
            lines[row] = "" if part == "\x1b[2K" else lines[row]
        elif not MOVES.match(part):
            lines[row] += part
        lines += [""] * (row + 1 - len(lines))
    return "\n".join(lines).rstrip()


def draw(command: str, written: str, file: Path) -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    shown = screen_of(written).splitlines()[-(HEIGHT - 2) :]
    console.print(f"$ {command}", markup=False, highlight=False, style="bold")
    console.print(Text.from_ansi("\n".join(shown)), highlight=False)
    file.write_text(console.export_svg(title="Accelerate Recipes"), encoding="utf-8")
    print(f"written: {file}")


if __name__ == "__main__":
    main()
