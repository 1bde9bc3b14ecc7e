"""A web server on the loopback interface that can misbehave in the ways that real ones do."""

from __future__ import annotations

import gzip
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Server:
    """What to serve, how to fail, and what was asked for."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    """For the coming requests, one after another: hang up after so many bytes."""
    statuses: list[int] = field(default_factory=list)
    """For the coming requests, one after another: answer with this error."""
    knows_ranges: bool = True
    range_shift: int = 0
    """Begin so many bytes after the place that was asked for."""
    says_length: bool = True
    calls_it_gzip: bool = False
    """Send a ``Content-Encoding`` for a file that is stored compressed, as some file stores do."""
    before_body: Callable[[], None] = lambda: None
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and Range header of every request."""


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, asked = self.path.lstrip("/"), self.headers.get("Range")
            server.requests.append((name, asked))
            if server.statuses or name not in server.files:
                self.send_error(server.statuses.pop(0) if server.statuses else 404)
                return
            content = server.files[name]
            if "gzip" in self.headers.get("Accept-Encoding", ""):
                content = gzip.compress(content)
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and server.knows_ranges else 0
            if start and start >= len(content):
                self.send_error(416)
                return
            start += server.range_shift if start else 0
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            if server.says_length:
                self.send_header("Content-Length", str(len(content) - start))
            if server.calls_it_gzip:
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            server.before_body()
            body = content[start:]
            self.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)

        def log_message(self, *args: object) -> None:
            pass

    return Handler


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(server))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_address[1]}/"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
