"""Who may take part: identities, the list of revoked ones, and what a participant's hello must agree with."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from cyber0.ledger import Ledger
from cyber0.ledger.header import CHAIN_BYTES
from cyber0.protocol.decider import Expulsion
from cyber0.protocol.messages import FOLLOWER, VOTER, Hello

ROLE_NAMES = {VOTER: "client", FOLLOWER: "follower"}

_FINGERPRINT = re.compile("[0-9a-f]{64}")


class Cut(Exception):
    """The federator ends a stream, for a reason that is counted. `status` names a gRPC status code."""

    def __init__(self, reason: str, status: str, text: str, *, barred: bool = False) -> None:
        super().__init__(text)
        self.reason, self.status, self.text, self.barred = reason, status, text, barred


@dataclass(frozen=True)
class Identity:
    """Who is at the other end, as proven by its certificate."""

    role: int
    client: int
    fingerprint: str = ""
    expires: float = math.inf
    """When the certificate does, in seconds since 1970."""


def check_identity(hello: Hello, identity: Identity) -> None:
    """Refuse a hello that names somebody else than the transport has proven."""
    if (identity.client, identity.role) != (hello.client, hello.role):
        raise Cut("other_identity", "PERMISSION_DENIED",
                  f"{_name_of(identity.role, identity.client)} is authenticated, but the hello names "
                  f"{_name_of(hello.role, hello.client)}")  # fmt: skip


def check_hello(hello: Hello, ledger: Ledger) -> None:
    """Refuse a hello of an unknown client, or about another run, model or history than this ledger's."""
    header, run = ledger.header, ledger.chain_at(0)
    if hello.role == VOTER and hello.client >= header.clients:
        raise Cut("unknown_client", "PERMISSION_DENIED",
                  f"there is no client {hello.client}: they are 0 to {header.clients - 1}")  # fmt: skip
    if hello.run != run:
        raise Cut("other_run", "FAILED_PRECONDITION", f"this is run {run.hex()[:16]}, not {hello.run.hex()[:16]}")
    for what, mine, theirs in (("trainable weights w0", header.weights_digest, hello.weights_digest),
                               ("frozen weights or buffers", header.rest_digest, hello.rest_digest)):  # fmt: skip
        if mine != theirs.hex():
            raise Cut("other_model", "FAILED_PRECONDITION", f"the {what} differ from those agreed on")
    if hello.round > len(ledger) or ledger.chain_at(hello.round)[:CHAIN_BYTES] != hello.chain:
        raise Cut("other_history", "FAILED_PRECONDITION",
                  f"this ledger has {len(ledger)} rounds and does not continue from the hash "
                  f"{hello.chain.hex()} after {hello.round}")  # fmt: skip


def _name_of(role: int, client: int) -> str:
    return f"{ROLE_NAMES.get(role, 'nobody')} {client}"


# Revocation.


def read_revoked(text: str) -> frozenset[str]:
    """Return the clients and certificate fingerprints (SHA-256 in hexadecimal) of a list, one per line."""
    lines = (line.partition("#")[0].strip().lower().replace(":", "") for line in text.splitlines())
    return frozenset(str(int(line)) if line.isdecimal() and len(line) < 20 else line for line in lines if line)


def unknown_revocations(revoked: frozenset[str], clients: int) -> set[str]:
    """Return the entries of a list that match nobody: neither a client nor a fingerprint."""
    ids = {str(client) for client in range(clients)}
    return {entry for entry in revoked if entry not in ids and not _FINGERPRINT.fullmatch(entry)}


def is_revoked(revoked: frozenset[str], role: int, client: int, fingerprint: str) -> bool:
    """Return whether a list names this client or its certificate."""
    return (role == VOTER and str(client) in revoked) or (bool(fingerprint) and fingerprint in revoked)


def revocation() -> Cut:
    """Return why a revoked participant is cut off."""
    return Cut("revoked", "PERMISSION_DENIED", "this certificate has been revoked")


# Expulsion.


def expelled(expulsion: Expulsion) -> Cut:
    """Return why a client that is no longer invited is cut off."""
    return Cut("expelled", "PERMISSION_DENIED", f"{expulsion.text}; it is not invited again in this run")
