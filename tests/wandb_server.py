"""A server in the place of W&B's that never answers as it should."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Unusable(BaseHTTPRequestHandler):
    """Answers each question in the way that its server is called by."""

    server: UnusableServer

    def do_GET(self) -> None:
        """Take a visit, as a server does that is up."""
        self.send("200", b"")

    def do_POST(self) -> None:
        """Take the question, and give no answer to it."""
        question = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append(self.path)
        if self.server.kind == "hang":
            self.server.released.wait(60)
        elif self.server.kind == "known key" and b"{ viewer {" in question:
            self.send("200", b'{"data": {"viewer": {"id": "me"}}}')
        elif self.server.kind in ("rubbish", "known key"):
            self.send("200", b"\x00 <html>")
        else:
            self.send(self.server.kind, b"no")

    def send(self, status: str, body: bytes) -> None:
        """Answer."""
        self.send_response(int(status))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Be silent."""


class UnusableServer(ThreadingHTTPServer):
    """Remembers what it was asked."""

    daemon_threads = True

    def __init__(self, kind: str) -> None:
        super().__init__(("127.0.0.1", 0), Unusable)
        self.kind, self.released = kind, threading.Event()
        self.asked: list[str] = []


@contextmanager
def unusable_server(kind: str) -> Iterator[tuple[str, list[str]]]:
    """Serve a kind: a status, rubbish, hang or known key; give its address and what was asked."""
    with UnusableServer(kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", server.asked
        finally:
            server.released.set()
            server.shutdown()
