"""Counts the connections that never get as far as a call: a wrong certificate, none, no TLS at all, or silence.

gRPC says nothing of them, but three things are known. It asks for the server's certificates at the beginning of every
handshake; the kernel knows which connections are open (on Linux; see sockets.py); and why TLS failed is in gRPC's log,
if somebody reads that (grpc_log.py). Whoever began a handshake, called nothing, is not connected any more and is not in
the log either counts as `no_call`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc

from cyber0.serve.sockets import Peer, Sockets, parse_peer
from cyber0.serve.tls import Credentials

NO_CALL = "no_call"


class Handshakes:
    """Those of one server.

    Args:
        explained: Returns how many have failed so far, by the reasons that are known.
    """

    def __init__(self, explained: Callable[[], Counter[str]] = Counter) -> None:
        self.failed = Counter[str]()
        """By reason, up to the last `news`."""
        self.port = 0
        """Where the server listens."""
        self._explained, self._sockets = explained, Sockets()
        self._begun, self._lock = 0, threading.Lock()
        self._callers: set[Peer] = set()  # since the last `news`
        self._known: dict[Peer, int] = {}  # who has called and is still connected, by the inode of the socket
        self._called = 0  # connections that have
        self._waiting = 0  # connections that are open and have not called yet
        self._settled = 0  # connections that had called or ended when we looked last

    def credentials(self, own: Credentials) -> Any:
        """Return credentials for a server that demands a certificate of the authority from every client."""
        pair = [(own.key, own.certificate)]
        return grpc.dynamic_ssl_server_credentials(
            grpc.ssl_server_certificate_configuration(pair, own.authority), self._begin, True
        )

    def _begin(self) -> None:
        """Called by threads of gRPC at the beginning of a handshake; None: the certificates stay as they are."""
        with self._lock:
            self._begun += 1

    def called(self, peer: str) -> None:
        """Note a call: its connection's handshake has succeeded."""
        if (name := parse_peer(peer)) is not None:
            self._callers.add(name)

    def news(self) -> Counter[str]:
        """Return what has failed since the last time, by reason; to be asked every second or so."""
        begun = self._begun  # first: whoever comes from here on is looked at next time
        if self._callers or self._waiting or begun != self._called + self.failed.total():
            self._look()
        failed = self._explained()
        # Of those that had ended a while ago: the call of a later one, or its line in the log, may be on its way.
        failed[NO_CALL] = max(self.failed[NO_CALL], self._settled - self._called - failed.total())
        self._settled = begun - self._waiting
        news, self.failed = failed - self.failed, +failed
        return news

    def _look(self) -> None:
        """Find out who has called and who is still connected."""
        callers, self._callers = self._callers, set()
        connected = self._sockets.accepted_at(self.port)
        if connected is None:  # nothing can be said
            self._waiting = self._begun
            return
        for peer in callers:
            socket = connected.get(peer)
            if peer not in self._known or (socket is not None and self._known[peer] != socket):
                self._called += 1
        self._known = {
            peer: socket for peer, socket in connected.items() if peer in callers or self._known.get(peer) == socket
        }
        self._waiting = len(connected) - len(self._known)
