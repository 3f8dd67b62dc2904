"""`cyber0 demo`: a federation to play with, in a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cyber0.demo.server import DemoServer


def demo(
    port: Annotated[int, typer.Option(metavar="PORT", help="0: any free port.", min=0, max=65535)] = 0,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Do not open a browser; the address is printed in any case.")
    ] = False,
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds of each configuration.", min=1, max=10_000)] = 200,
) -> None:
    """Choose in a browser who lies, how, and the rule, and watch a federation of 12 clients learn.

    It trains on this machine while you watch: MNIST if it is cached, otherwise digits drawn from fonts; nothing is
    downloaded or written. The page is for this machine only. Ctrl-C ends it, with exit code 0.
    """
    from cyber0.demo.server import DemoServer

    try:
        with DemoServer(port) as server:  # a port that can't be had is refused before anything is loaded
            _run(server, rounds, opens=not no_browser)
    except KeyboardInterrupt:
        print("\nthe demo has ended", flush=True)


def _run(server: DemoServer, rounds: int, *, opens: bool) -> None:
    print("preparing the data and the first model ...", flush=True)
    import webbrowser

    from cyber0.demo.data import choose
    from cyber0.demo.session import Session
    from cyber0.kernels.memory import keep_freed_memory

    keep_freed_memory()
    session = Session(choose(), rounds)
    server.start(session)
    print(f"the demo is at {server.address} (Ctrl-C ends it)", flush=True)
    if opens:
        webbrowser.open(server.address)
    session.run()
