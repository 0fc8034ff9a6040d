"""A stand-in for W&B's server that gives only unusable answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Unusable(BaseHTTPRequestHandler):
    """Answers each request as the `answer` of its server says."""

    server: UnusableServer

    def do_GET(self) -> None:
        """Answer a visit, as a server that is up does."""
        self.send("200", b"")

    def do_POST(self) -> None:
        """Read the request, and answer wrongly or not at all."""
        question = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requested_paths.append(self.path)
        if self.server.answer == "hang":
            self.server.released.wait(60)
        elif self.server.answer == "known key" and b"{ viewer {" in question:
            self.send("200", b'{"data": {"viewer": {"id": "me"}}}')
        elif self.server.answer in ("rubbish", "known key"):
            self.send("200", b"\x00 <html>")
        else:
            self.send(self.server.answer, b"no")

    def send(self, status: str, body: bytes) -> None:
        """Send an answer."""
        self.send_response(int(status))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class UnusableServer(ThreadingHTTPServer):
    """Serves one wrong answer, and remembers the paths of all requests."""

    daemon_threads = True

    def __init__(self, answer: str) -> None:
        super().__init__(("127.0.0.1", 0), Unusable)
        self.answer = answer
        self.released = threading.Event()
        self.requested_paths: list[str] = []


@contextmanager
def unusable_server(answer: str) -> Iterator[tuple[str, list[str]]]:
    """Run such a server; yield its address and the list of the paths that were requested.

    Args:
        answer: an HTTP status such as "401", "rubbish", "hang", or "known key".
    """
    with UnusableServer(answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", server.requested_paths
        finally:
            server.released.set()
            server.shutdown()
