"""Which addresses and Host headers are this machine's own, for the servers that show a run to its owner.

A web page elsewhere can make its own name point to this machine (DNS rebinding), and the reader's browser then takes
our answer for that page's own data. The browser still sends that name as Host: a server that answers only to addresses
and to its own name gives such a page nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence


def is_own_host(headers: Sequence[str], bound: str) -> bool:
    """Return whether a request's Host headers name the server that listens on the host `bound`.

    An address does, because no name server was asked for it, and so does the server's own name; the port may be any,
    because the request may have come through a tunnel. Exactly one header has to be there: all browsers and Prometheus
    send it.
    """
    if len(headers) != 1:
        return False
    header = headers[0].strip()
    name = header.rsplit(":", 1)[0] if not header.endswith("]") else header
    name = name.strip("[]").lower()
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        local = name == "localhost"
        return local or (not is_loopback(bound) and name in {bound.lower(), socket.gethostname().lower()})
    return not is_loopback(bound) or address.is_loopback


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
