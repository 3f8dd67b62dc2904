"""The demo's server: its page, its data, and the requests that change it.

Whoever can read the page can steer the demo, and nobody else: a request that changes something must come from our own
page, by its Origin and by a token that only the page holds. Another web site can neither read the token nor send it.
"""

from __future__ import annotations

import json
import secrets
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, Self

from cyber0.errors import ConfigError
from cyber0.report.local_server import LOOPBACK, LocalServer, PageHandler
from cyber0.report.page import document, to_json

if TYPE_CHECKING:
    from cyber0.demo.session import Session

TOKEN_HEADER = "X-Cyber0-Token"
LONGEST_REQUEST = 4096
PLAIN = (
    "cyber0 demo: choose which clients lie, what they send and by which rule the federator decides, and watch the "
    "accuracy of the model.",
)


class DemoServer:
    """Serves a session on this machine, from `start` to the end of the `with` block.

    Args:
        port: 0 means any free one.
    """

    session: Session

    def __init__(self, port: int = 0) -> None:
        self.token, self.id = secrets.token_urlsafe(24), secrets.token_hex(8)
        try:
            self._server = LocalServer((LOOPBACK, port), _Handler, self)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"the demo can't listen on {LOOPBACK}, port {port}: {error}; choose another by --port (0: a free one)"
            ) from None

    @property
    def address(self) -> str:
        """Where a browser finds the page."""
        return self._server.address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.end()

    def start(self, session: Session) -> None:
        """Start to answer."""
        self.session = session
        self._server.start()

    def page(self) -> str:
        """Return the page as it is now, with the token."""
        data = {**self.session.constants(), "token": self.token, "token_header": TOKEN_HEADER, "state": self.state()}
        return document("cyber0 demo", PLAIN, data, "demo.js", styles=("report.css", "demo.css"), connects=True)

    def state(self) -> dict[str, Any]:
        """Return what the page polls."""
        return {"id": self.id, **self.session.snapshot()}


class _Handler(PageHandler):
    methods: ClassVar[tuple[str, ...]] = ("GET", "POST")

    def do_GET(self) -> None:
        demo: DemoServer = self.server.owner
        if self.path == "/":
            self.answer(demo.page(), "text/html; charset=utf-8")
        elif self.path == "/data.json":
            self.answer(to_json(demo.state()), "application/json")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        demo: DemoServer = self.server.owner
        if not self._is_from_our_page(demo.token):
            self.send_error(HTTPStatus.FORBIDDEN, "this request does not come from the demo's page")
            return
        body = self._body()
        if body is None:
            return
        try:
            if self.path == "/settings":
                demo.session.choose(body)
            elif self.path == "/control":
                demo.session.control(body.get("action"))
            else:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
        except ConfigError as error:
            self._refuse(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
            return
        self.answer(to_json(demo.state()), "application/json")

    def _is_from_our_page(self, token: str) -> bool:
        origins, tokens = self.headers.get_all("Origin", []), self.headers.get_all(TOKEN_HEADER, [])
        same = origins == [f"http://{self.headers['Host'].strip()}"]
        return same and len(tokens) == 1 and secrets.compare_digest(tokens[0].encode(), token.encode())

    def _body(self) -> dict[str, Any] | None:
        """Return the request's JSON object; None if it was refused."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and int(length) <= LONGEST_REQUEST):
            self._refuse(HTTPStatus.BAD_REQUEST, f"a request has a Content-Length of at most {LONGEST_REQUEST}")
            return None
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            self._refuse(HTTPStatus.BAD_REQUEST, "a request is a JSON object")
            return None
        return body

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self.answer(to_json({"error": text}), "application/json", status)
