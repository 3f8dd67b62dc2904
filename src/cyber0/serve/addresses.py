"""HOST:PORT: what is valid, what is this machine, and which port is free."""

from __future__ import annotations

import os
import socket

from cyber0.errors import ConfigError
from cyber0.report.own_host import is_loopback

LAST_PORT = 65_535


def is_address(text: str, first_port: int = 0) -> bool:
    """Return whether a text is HOST:PORT with a valid port."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdecimal() and first_port <= int(port) <= LAST_PORT


def check_address(address: str, first_port: int = 1) -> None:
    """Refuse what gRPC would take for something else: it counts ports modulo 65,536."""
    if not is_address(address, first_port):
        raise ConfigError(f"{address!r} is not HOST:PORT with a port from {first_port} to {LAST_PORT}")


def check_free(address: str) -> None:
    """Refuse a port that another process listens on; port 0 is any free one."""
    host, _, port = address.rpartition(":")
    if int(port) == 0:
        return
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
            if os.name == "posix":  # connections that ended a minute ago do not count; Windows would share the port
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[0][4])
    except OSError as error:
        raise ConfigError(
            f"can't listen on {address}: {error.strerror}; choose another port, or stop the process that uses it"
        ) from None


def count_addresses(address: str) -> int:
    """Return how many addresses a host has: gRPC listens on each of them."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return 2  # to gRPC, whatever the system says: 127.0.0.1 and ::1
    try:
        return len({entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError:  # gRPC will say so
        return 1


def refuse_unless_loopback(address: str) -> None:
    """Refuse plaintext with anything but this machine."""
    host = address.rpartition(":")[0].strip("[]")
    if not is_loopback(host):
        raise ConfigError(
            f"--insecure is for this machine alone (127.0.0.1, ::1 or localhost), and {address} is not: use --certs"
        )
