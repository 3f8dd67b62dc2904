"""An HTTP server for one's own browser: what the live page and the demo have in common.

It listens on loopback by default and refuses a Host header that is not its own (own_host.py), so that no web page
elsewhere can read what it shows through the reader's browser.
"""

from __future__ import annotations

import os
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, ClassVar

from cyber0.report.own_host import is_own_host

LOOPBACK = "127.0.0.1"
SLOWEST_CLIENT_S = 10.0
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


class LocalServer(ThreadingHTTPServer):
    """The server; `owner` is what its handlers ask for the pages."""

    daemon_threads = True
    # POSIX systems remember a server's connections for a minute after it has closed them, and would refuse its port for
    # as long. A port that somebody listens on stays refused; on Windows the same option would share it.
    allow_reuse_address = os.name == "posix"

    def __init__(self, address: tuple[str, int], handler: type[PageHandler], owner: Any) -> None:
        self.owner = owner
        self.host = address[0]
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True)

    def start(self) -> None:
        """Answer from now on, in a thread of its own."""
        self._thread.start()

    @property
    def started(self) -> bool:
        """Whether it answers."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Stop answering, and free the port."""
        if self.started:
            self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        # HTTPServer would resolve the machine's name here, which can take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that hang up."""

    @property
    def address(self) -> str:
        """Where a browser finds the page."""
        host, port = self.server_address[:2]
        name = (
            LOOPBACK if host == "0.0.0.0" else "[::1]" if host == "::" else f"[{host!s}]" if ":" in str(host) else host
        )
        return f"http://{name!s}:{port}/"


class PageHandler(BaseHTTPRequestHandler):
    """Answers the methods that it lists, to requests that name this server."""

    server: LocalServer
    methods: ClassVar[tuple[str, ...]] = ("GET",)
    timeout = SLOWEST_CLIENT_S
    server_version, sys_version = "cyber0", ""

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        if self.command not in self.methods:
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)
            return False
        if not is_own_host(self.headers.get_all("Host", []), self.server.host):
            self.send_error(HTTPStatus.FORBIDDEN, "this server has another name")
            return False
        return True

    def answer(self, text: str, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        """Send a text of that media type."""
        body = text.encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Leave the terminal to the run."""
