"""PageServer: a small web server for the page of a run, on the loopback address, protected by a token.

    GET /TOKEN/         the page, which requests the data itself, once a second
    GET /TOKEN/data     the view, as JSON
    GET /TOKEN/stacks   where each worker is right now, as JSON

Python's own http.server is enough: the page has one or two readers on this machine, a request takes a millisecond, and
a training script needs no web framework. It listens on 127.0.0.1 only. Requests without the token get an empty 404.
Requests with another host name are refused, so that no web page can reach the server by DNS rebinding.
"""

from __future__ import annotations

import functools
import hmac
import json
import secrets
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from reap.errors import ReapError

_HOST = "127.0.0.1"
_PATIENCE = 10.0  # seconds that a connection may be idle
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}
Answers = dict[str, tuple[str, Callable[[], bytes]]]  # by path: the content type, and the function that makes the body


class PageServer:
    """Serves the page, the view and the stacks, in threads of its own, until it is closed."""

    def __init__(self, view: Callable[[], dict[str, Any]], stacks: Callable[[], dict[str, str]], port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        answers: Answers = {
            "": ("text/html; charset=utf-8", _page),
            "data": ("application/json", lambda: _json(view)),
            "stacks": ("application/json", lambda: _json(stacks)),
        }
        self._server = ThreadingHTTPServer((_HOST, port), functools.partial(_Handler, self.token, answers))
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="reap-page", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://{_HOST}:{self.port}/{self.token}/"

    def close(self) -> None:
        """Stop serving. May be called twice."""
        self._server.shutdown()
        self._server.server_close()
        if threading.current_thread() is not self._thread:
            self._thread.join()


@functools.cache
def _page() -> bytes:
    return resources.files("reap.watching").joinpath("page.html").read_bytes()


def _json(make: Callable[[], Any]) -> bytes:
    return json.dumps(make(), allow_nan=False, default=str).encode()


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    timeout = _PATIENCE
    server_version, sys_version = "reap", ""

    def __init__(self, token: str, answers: Answers, *arguments: Any) -> None:
        self._token, self._answers = token, answers
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Serve the requested path, if the request has the token."""
        port = self.server.server_address[1]  # type: ignore[index]
        if self.headers.get("Host", "") not in (f"{_HOST}:{port}", f"localhost:{port}"):
            self._send(403, "text/plain", b"")
            return
        token, _, path = self.path.partition("?")[0].removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self._token.encode()) or path not in self._answers:
            self._send(404, "text/plain", b"")
            return
        kind, make = self._answers[path]
        try:
            body = make()
        except ReapError as error:  # the collector is closed
            self._send(410, "text/plain; charset=utf-8", str(error).encode())
            return
        self._send(200, kind, body)

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Do not log requests."""
