"""Take the README's pictures of a terminal: a run as it trains, and a comparison of two.

python benchmarks/pictures.py --output docs

The script runs the commands in a pseudo-terminal of 100 columns, and draws its content as SVG.
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

WIDTH = 100  # columns
HEIGHT = 30  # lines
TRAIN = "python recipes/mnist_mlp.py --dataset digits --validation-share 0.1"
RUNS = {"narrow": "--hidden-sizes 64 64", "wide": "--hidden-sizes 1024 1024"}
COMPARE = "recipes compare runs/narrow runs/wide"
# Line ends and all escape sequences except those for colours.
MOVES = re.compile(r"(\r|\n|\x1b\[\d*[A-HJKa-ln-z]|\x1b\[\?\d+[hl])")
ERASE_LINE = "\x1b[2K"


def main() -> None:
    """Train two runs, compare them, and draw both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--output", type=Path, default=Path("docs"), metavar="DIR", help="folder of the pictures"
    )
    output_folder = parser.parse_args().output
    output_folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work_folder:
        for name in ("recipes", "common"):
            (Path(work_folder) / name).symlink_to(Path(name).resolve())
        for name, flags in RUNS.items():
            command = f"{TRAIN} {flags}"
            output = output_of(f"{command} --tracker none --output-dir runs/{name}", work_folder)
        draw(command, middle_of_training(output), output_folder / "terminal.svg")
        draw(COMPARE, output_of(COMPARE, work_folder), output_folder / "comparison.svg")


def middle_of_training(output: str) -> str:
    """Return the output of a training until about four fifths of it, with a whole progress bar."""
    with_bar = output[: output.rindex("━")]  # the bar disappears at the end
    end = with_bar.rindex(ERASE_LINE, 0, len(with_bar) * 4 // 5)  # before a line is redrawn
    return with_bar[:end]


def output_of(command: str, folder: str) -> str:
    """Run a command in a pseudo-terminal, and return everything that it writes there.

    Raises:
        SystemExit: when the command fails; with what it showed.
    """
    control, terminal = pty.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    words = shlex.split(command)
    if words[0] == "recipes":
        words = ["python", "-m", "common.tools", *words[1:]]
    process = subprocess.Popen(
        [sys.executable, *words[1:]],
        cwd=folder,
        env={**os.environ, "TERM": "xterm-256color"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    output = b"".join(iter(lambda: read(control), b"")).decode(errors="replace")
    if process.wait():
        raise SystemExit(f"{command} failed:\n{screen_of(output)}")
    return output


def read(control: int) -> bytes:
    """Return the next bytes written to a pseudo-terminal; nothing once it is closed."""
    try:
        return os.read(control, 65536)
    except OSError:  # Linux raises it when the last process has closed the terminal
        return b""


def screen_of(output: str) -> str:
    """Return the lines that stand in the terminal after `output`.

    This is not a full terminal: rich only moves up, erases whole lines, and rewrites them.
    """
    lines = [""]
    row = 0
    for part in MOVES.split(output):
        if part == "\n":
            row += 1
        elif part.startswith("\x1b[") and part.endswith("A"):
            row = max(0, row - int(part[2:-1] or 1))
        elif part == ERASE_LINE:
            lines[row] = ""
        elif not MOVES.match(part):
            lines[row] += part
        lines += [""] * (row + 1 - len(lines))
    return "\n".join(lines).rstrip()


def draw(command: str, output: str, file: Path) -> None:
    """Draw a terminal with a command and the last lines of its output."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    shown = screen_of(output).splitlines()[-(HEIGHT - 2) :]
    console.print(f"$ {command}", markup=False, highlight=False, style="bold")
    console.print(Text.from_ansi("\n".join(shown)), highlight=False)
    file.write_text(console.export_svg(title="Accelerate Recipes"), encoding="utf-8")
    print(f"written: {file}")


if __name__ == "__main__":
    main()
