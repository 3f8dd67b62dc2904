"""A real browser for tests: Debian's chromium without a window, driven through its debugging pipe."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 60


def find() -> str | None:
    """Return where the browser is, if there is one."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Chromium:
    """One browser with one tab. What it logs, throws and asks of the network is kept."""

    def __init__(self, home: Path) -> None:
        binary = find()
        assert binary is not None
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                 "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={home}"]  # fmt: skip
        # The browser reads its orders from descriptor 3 and answers on 4.
        line = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", line, "bash", binary, *flags, "about:blank"], pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._ids, self._session = b"", itertools.count(1), ""
        self.messages: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> Self:
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def emulate(self, width: int, height: int = 900, *, dark: bool = False, phone: bool = False) -> None:
        """Be a screen of that size, and a reader who likes it light or dark."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, address: str | Path) -> float:
        """Open a page and wait until it is drawn; return the seconds that took."""
        self.messages.clear()
        self.requests.clear()
        began = time.monotonic()
        self._call("Page.navigate", url=address.as_uri() if isinstance(address, Path) else address)
        self.wait("document.readyState === 'complete' && document.querySelectorAll('.uplot canvas').length > 0")
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
        return time.monotonic() - began

    def run(self, script: str) -> Any:
        """Return what an expression comes to in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.02)

    def hover(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Move the mouse to a place within an element."""
        self._mouse("mouseMoved", *self._place(selector, x, y))

    def click(self, selector: str) -> None:
        """Click the middle of an element."""
        place = self._place(selector, 0.5, 0.5)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._mouse(kind, *place)

    def drag(self, selector: str, start: float, end: float) -> None:
        """Press the mouse at a share of an element's width, and let go at another."""
        first, last = self._place(selector, start, 0.5), self._place(selector, end, 0.5)
        self._mouse("mouseMoved", *first)
        self._mouse("mousePressed", *first)
        self._mouse("mouseMoved", *last, buttons=1)
        self._mouse("mouseReleased", *last)

    def picture(self, path: Path) -> None:
        """Save the whole page as a PNG."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _place(self, selector: str, x: float, y: float) -> tuple[float, float]:
        name = json.dumps(selector)
        self.run(f"document.querySelector({name}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.run(f"document.querySelector({name}).getBoundingClientRect().toJSON()")
        return box["x"] + x * box["width"], box["y"] + y * box["height"]

    def _mouse(self, kind: str, x: float, y: float, *, buttons: int = 0) -> None:
        pressed = {} if kind == "mouseMoved" and not buttons else {"button": "left", "clickCount": 1}
        self._call(
            "Input.dispatchMouseEvent", type=kind, x=x, y=y, **({"buttons": buttons} if buttons else {}), **pressed
        )

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        order = {"id": number, "method": method, "params": parameters}
        if self._session:
            order["sessionId"] = self._session
        os.write(self._out, json.dumps(order).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self._keep(message)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._in], [], [], PATIENCE_S)[0], "the browser does not answer"
            part = os.read(self._in, 1 << 20)
            assert part, "the browser has gone"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _keep(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Log.entryAdded":
            self.messages.append(parameters["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(str([argument.get("value") for argument in parameters["args"]]))
        elif method == "Runtime.exceptionThrown":
            self.messages.append(str(parameters["exceptionDetails"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
