"""The web page of a comparison in a real browser: it draws, answers, and loads nothing.

The browser is a Chromium of the system. It opens the page from a file, without a window, and prints
the page's elements after its script has run.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from common.tools.compare.comparison import compare
from common.tools.compare.page import page_of
from common.tools.compare.readers.sources import read_runs
from tests.unit.tools.compare.run_folders import rows, write_run

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((path for path in map(shutil.which, NAMES) if path), "")
ATTACK = "</script><img src=http://attack.invalid/x onerror=\"document.title='attacked'\">"
# Records errors from the first line of the page's script on.
WATCH = "<script>window.errors = []; onerror = (text) => { errors.push(text); };</script>"
# Acts as a user, and puts the page's reactions into an attribute of its body.
USER = f"<script>{Path(__file__).with_name('page_user.js').read_text()}</script>"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason=f"there is no browser here (one of {', '.join(NAMES)})"),
]


class Recorder(BaseHTTPRequestHandler):
    """A proxy that refuses every request, and remembers its address."""

    addresses: list[str] = []

    def do_GET(self) -> None:
        self.addresses.append(self.path)
        self.send_error(404)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[HTTPServer]:
    """Start a proxy for the browser; `Recorder.addresses` has what it asked for."""
    Recorder.addresses.clear()
    server = HTTPServer(("127.0.0.1", 0), Recorder)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def opened(file: Path, proxy: HTTPServer) -> tuple[str, list[str]]:
    """Open a file in the browser; return its elements as HTML and the lines of its console."""
    flags = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        f"--user-data-dir={file.parent / 'profile'}",
        f"--proxy-server=http://127.0.0.1:{proxy.server_port}",
        *("--enable-logging=stderr", "--window-size=1200,900"),
        *("--virtual-time-budget=3000", "--dump-dom"),
    )
    command = [BROWSER, *flags, file.as_uri()]
    answer = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=240)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout, [line for line in answer.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the page of two groups: three seeds, and a run without times that attacks."""
    folder = tmp_path_factory.mktemp("runs")
    sources = [
        write_run(
            folder / f"seed-{seed}",
            {"config.seed": seed, "config.dropout": 0.0},
            rows([0.5, 0.7 + 0.01 * seed, 0.9], seconds=2.0 + 0.1 * seed),
        )
        for seed in range(3)
    ]
    changes = {"config.dropout": 0.1, "config.run_name": ATTACK}
    sources.append(write_run(folder / "other", changes, rows([0.4, 0.6], seconds=None)))
    return page_of(compare(read_runs(sources)))


def test_page_draws_without_errors_and_without_a_network(
    text: str, tmp_path: Path, proxy: HTTPServer
) -> None:
    """The attack in a run's name does nothing."""
    file = tmp_path / "page.html"
    file.write_text(text)
    drawn, console = opened(file, proxy)
    assert console == []
    assert not [address for address in Recorder.addresses if "attack" in address]
    assert "<title>Runs of resnet on digits</title>" in drawn
    assert "attack.invalid" in drawn  # as text
    # Two charts, each with training and validation of three seeds, their mean, and another run.
    assert len(re.findall(r'<path class="line (?:seed|training|evaluation)" d="M\d', drawn)) == (
        2 * 2 * (3 + 1 + 1) + legend_lines(drawn)
    )


def legend_lines(drawn: str) -> int:
    """Return the number of lines in the legends, which are as long as their pictures."""
    return len(re.findall(r'd="M0 5H28"', drawn))


def test_attack_would_have_been_seen(tmp_path: Path, proxy: HTTPServer) -> None:
    """Without escapes and policy, it changes the title, and the proxy gets its request."""
    file = tmp_path / "page.html"
    file.write_text(f"<title>none</title><script>{ATTACK}")
    drawn, _ = opened(file, proxy)
    assert "<title>attacked</title>" in drawn
    assert [address for address in Recorder.addresses if "attack.invalid" in address]


def test_page_answers_its_user(text: str, tmp_path: Path, proxy: HTTPServer) -> None:
    """Pointer, keys, axes, scale, legend and choice of metrics; the policy is left out for this."""
    without_policy = re.sub(r"<meta http-equiv=[^>]*>", WATCH, text)
    file = tmp_path / "page.html"
    file.write_text(without_policy.replace("</body>", f"{USER}</body>"))
    drawn, console = opened(file, proxy)
    assert console == []
    result = result_of(drawn)
    assert result["errors"] == []
    assert result["headings"] == ["loss", "accuracy"]
    assert result["drawn"] == 20
    assert result["pointed"].startswith("update 30")
    assert "mean of 3 (training)" in result["pointed"]
    assert result["left"] == ""
    assert result["moved"].startswith("update 20")
    assert "dropout=0 (baseline), mean of 3 (validation) 1.05 ± 0" in result["spoken"]
    assert f"{ATTACK} (training) 1" in result["spoken"]
    assert result["escaped"] == ""
    assert result["axis"] == "training time, s"
    assert ATTACK in result["absent"]
    assert result["movedCurves"]
    assert result["logarithmic"]
    assert result["restored"]
    assert result["withoutGroup"] == 4
    assert result["withoutSeed"] == 16
    assert result["isPartly"]
    assert result["charts"] == 3
    assert result["notNumbers"] == 0
    assert not result["isTooWide"]


def result_of(drawn: str) -> dict[str, Any]:
    """Return what the simulated user saw."""
    match = re.search(r'<body data-result="([^"]*)"', drawn)
    assert match is not None, drawn[-3000:]
    result: dict[str, Any] = json.loads(html.unescape(match[1]))
    return result
