"""An HTTP proxy between a client and a real server, which misbehaves on demand."""

from __future__ import annotations

import http.client
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

#: What to do with a request: "pass" it on; "lose_request": hang up before passing it on;
#: "lose_reply": pass it on and hang up; a number: answer with this status and not pass it on;
#: "expired": answer as S3 does when credentials have expired.
Action = Literal["pass", "lose_request", "lose_reply", "expired"] | int


class Proxy(ThreadingHTTPServer):
    """Forwards requests unchanged, so that signatures stay valid.

    Attributes:
        endpoint: "http://127.0.0.1:port".
        actions: for the next requests, in order; when empty, everything passes.
        ignores_conditions: answer a failed precondition with success, as servers do that do not
            know ``If-None-Match``.
        seen: "METHOD path" of every request.
    """

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream).netloc
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.actions: deque[Action] = deque()
        self.ignores_conditions = False
        self.seen: list[str] = []

    def next_action(self, request: str) -> Action:
        self.seen.append(request)
        return self.actions.popleft() if self.actions else "pass"


class _Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        action = self.server.next_action(f"{self.command} {self.path}")
        if action == "lose_request":
            return self._hang_up()
        if action == "expired":
            return self._answer(400, [], _error(400, "ExpiredToken"))
        if isinstance(action, int):
            return self._answer(action, [], _error(action))
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=30)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body)
            reply = upstream.getresponse()
            content = reply.read()
        finally:
            upstream.close()
        if action == "lose_reply":
            return self._hang_up()
        if reply.status == 412 and self.server.ignores_conditions:
            return self._answer(200, [("ETag", '"0"')], b"")
        self._answer(reply.status, reply.getheaders(), content)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _handle

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response_only(status)
        named = {name.lower(): value for name, value in headers}
        named.setdefault("content-length", str(len(content)))
        named.pop("transfer-encoding", None)
        for name, value in named.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the tests' output clean."""


def _error(status: int, code: str = "Refused") -> bytes:
    code = {503: "SlowDown", 500: "InternalError", 429: "TooManyRequests"}.get(status, code)
    return f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()


@contextmanager
def proxy(upstream: str) -> Iterator[Proxy]:
    """Run a proxy to ``upstream`` ("http://host:port") until the block ends."""
    with Proxy(upstream) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
