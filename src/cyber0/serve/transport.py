"""gRPC: the hub behind a server, and a participant's channel to it. Messages are plain bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from cyber0.errors import ConfigError
from cyber0.ledger import opening_of
from cyber0.protocol.messages import payload_bytes
from cyber0.serve import tls as certificates
from cyber0.serve.addresses import refuse_unless_loopback
from cyber0.serve.admission import Cut, Identity, is_revoked, revocation
from cyber0.serve.hub import STOPPING, Hub
from cyber0.serve.identity import Authority, expiration
from cyber0.serve.sockets import Sockets
from cyber0.storage.disk import Clock

SERVICE = "cyber0.Federation"
KEEPALIVE_MS = 10_000
HANDSHAKE_MS = 20_000  # a TLS handshake that takes longer is broken off
IDLE_MS = 300_000  # a connection without a stream is closed; a participant has none while it builds its model
_LAST_WORD_SECONDS = 1.0  # in which the reason of a refusal reaches the other side before its connection ends
_DEFAULT_LIMIT = 4 << 20  # bytes of the longest message that a participant reads, as in gRPC
_SMALLEST_LIMIT = 4096  # bytes of the longest message that a federator reads, at least

# Messages have some dozen bytes. Probing the bandwidth would grow buffers to megabytes a client; with a small window
# gRPC tells the other side less often that it may send more: 13 bytes less a message each way.
LEAN = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096), ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_MS), ("grpc.http2.max_pings_without_data", 0))  # fmt: skip


class _GrpcConnection:
    """A gRPC stream as the hub sees it."""

    def __init__(self, context: Any, identity: Identity | None, sockets: Sockets) -> None:
        self.identity = identity
        self.read, self.write = context.read, context.write  # at the end `read` returns grpc.aio.EOF
        self._peer, self._sockets = context.peer(), sockets

    def wire(self) -> tuple[int, int] | None:
        return self._sockets.news(self._peer)


class Service:
    """The two calls that a participant makes: `Describe` returns the ledger's opening, `Rounds` is the stream."""

    def __init__(self, hub: Hub, authority: Authority | None, wall_clock: Clock = time.time) -> None:
        self._hub, self._authority, self._wall_clock, self._sockets = hub, authority, wall_clock, Sockets()
        self._opening = opening_of(hub.ledger.header)
        self._ending: set[str] = set()

    def handlers(self) -> Any:
        """Return what a gRPC server is given; messages are plain bytes."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Describe": grpc.unary_unary_rpc_method_handler(self._describe),
                "Rounds": grpc.stream_stream_rpc_method_handler(self._rounds),
            },
        )

    async def _describe(self, request: bytes, context: Any) -> bytes:
        async def opening(identity: Identity | None) -> bytes:
            self._refuse_revoked(identity)
            async with self._hub.call(identity, len(self._opening)):
                self._hub.log_header_sent(identity)
                return self._opening

        result: bytes = await self._guarded(context, opening)
        return result

    async def _rounds(self, requests: Any, context: Any) -> None:
        await self._guarded(
            context, lambda identity: self._hub.serve(_GrpcConnection(context, identity, self._sockets))
        )

    async def _guarded(self, context: Any, serve: Callable[[Identity | None], Awaitable[Any]]) -> Any:
        try:
            return await serve(self._identity(context))
        except Cut as cut:
            if cut.reason != STOPPING:
                self._hang_up(context.peer())
            await context.abort(grpc.StatusCode[cut.status], cut.text)

    def _hang_up(self, peer: str) -> None:
        """End a connection once it has been told why, or at once if it calls again: refusing a call takes 0.4 ms."""
        if peer in self._ending:
            self._sockets.hang_up(peer)
            return
        self._ending.add(peer)

        def end() -> None:
            self._ending.discard(peer)
            self._sockets.hang_up(peer)

        asyncio.get_running_loop().call_later(_LAST_WORD_SECONDS, end)

    def _identity(self, context: Any) -> Identity | None:
        """Return who the certificate says is calling; gRPC has verified that it leads to one in ca.pem."""
        if self._authority is None:
            return None
        identity = None
        try:
            identity = self._authority.identity_of(context.auth_context().get("x509_pem_cert", [b""])[0])
            if identity.expires <= self._wall_clock():  # since the handshake
                raise expiration(identity)
        except Cut as cut:
            self._hub.count_refusal(identity, cut)
            raise
        return identity

    def _refuse_revoked(self, identity: Identity | None) -> None:
        if identity and is_revoked(self._hub.revoked, identity.role, identity.client, identity.fingerprint):
            self._hub.count_refusal(identity, cut := revocation())
            raise cut


def make_server(
    hub: Hub, listen: str, credentials: certificates.Credentials | None, max_connections: int | None = None
) -> tuple[Any, int]:
    """Return a gRPC server for the hub, not yet started, and its port. Without credentials: loopback only."""
    largest = max(_SMALLEST_LIMIT, 2 * payload_bytes(hub.federator.scalars, hub.federator.codec))
    options = [*LEAN, ("grpc.max_receive_message_length", largest), ("grpc.max_concurrent_streams", 8),
               ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
               ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS), ("grpc.max_connection_idle_ms", IDLE_MS),
               ("grpc.so_reuseport", 0)]  # fmt: skip
    if max_connections is not None:  # those beyond are closed as soon as they are accepted
        options.append(("grpc.max_allowed_incoming_connections", max_connections))
    server = grpc.aio.server(options=options)
    authority = None if credentials is None else Authority(credentials.authority)
    server.add_generic_rpc_handlers((Service(hub, authority).handlers(),))
    try:
        if credentials is None:
            refuse_unless_loopback(listen)
            port = server.add_insecure_port(listen)
        else:
            pair = [(credentials.key, credentials.certificate)]
            secured = grpc.ssl_server_credentials(pair, credentials.authority, require_client_auth=True)
            port = server.add_secure_port(listen, secured)
    except RuntimeError:  # gRPC has printed why
        raise ConfigError(
            f"can't listen on {listen}: another process has the port, or the host is no address of this machine"
        ) from None
    return server, port


def open_channel(address: str, credentials: certificates.Credentials | None, largest: int = _DEFAULT_LIMIT) -> Any:
    """Return a channel to a federator, for messages of `largest` bytes at most. Without credentials: loopback only."""
    options = [*LEAN, ("grpc.max_receive_message_length", largest), ("grpc.enable_retries", 0),
               ("grpc.use_local_subchannel_pool", 1)]  # fmt: skip
    if credentials is None:
        refuse_unless_loopback(address)
        return grpc.aio.insecure_channel(address, options)
    secured = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    return grpc.aio.secure_channel(address, secured, options)
