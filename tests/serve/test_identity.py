"""What a certificate proves: many made by hand, good and bad, before a real gRPC server; and how long it does."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import os
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from virtual_time import run as run_virtual
from wire import Pipe, Voter, hello_of, make_hub, run_voter

grpc = pytest.importorskip("grpc", reason="needs the deploy extra: pip install 'cyber0[deploy]'")
x509 = pytest.importorskip("cryptography.x509", reason="needs the deploy extra: pip install 'cyber0[deploy]'")

from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec, rsa  # noqa: E402
from cryptography.x509.oid import ExtendedKeyUsageOID as Purpose  # noqa: E402
from cryptography.x509.oid import NameOID  # noqa: E402

from cyber0.errors import ConfigError, ProtocolError  # noqa: E402
from cyber0.ledger.opening import OPENING_LIMIT  # noqa: E402
from cyber0.protocol.messages import FOLLOWER, VOTER  # noqa: E402
from cyber0.serve import tls, transport  # noqa: E402
from cyber0.serve.admission import Cut, Identity  # noqa: E402
from cyber0.serve.chores import RevocationFile, chores_of  # noqa: E402
from cyber0.serve.hub import Hub  # noqa: E402
from cyber0.serve.identity import Authority, expiry_warning  # noqa: E402
from cyber0.serve.operations import make_log  # noqa: E402
from cyber0.serve.stats import ServerStats  # noqa: E402
from cyber0.serve.tls import Credentials  # noqa: E402

DAY = datetime.timedelta(days=1)
NOW = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
PEM = serialization.Encoding.PEM
CLIENT = "urn:cyber0:client:1"
IN, REFUSED, NO_HANDSHAKE = "OK", "PERMISSION_DENIED", "UNAVAILABLE"


class Made(NamedTuple):
    """A certificate made by hand, and its key."""

    certificate: Any
    key: Any

    @property
    def pem(self) -> bytes:
        data: bytes = self.certificate.public_bytes(PEM)
        return data

    @property
    def key_pem(self) -> bytes:
        kind = serialization.PrivateFormat.PKCS8
        data: bytes = self.key.private_bytes(PEM, kind, serialization.NoEncryption())
        return data


def uri(text: str) -> Any:
    return x509.UniformResourceIdentifier(text)


def make(
    issuer: Made | None, *names: Any, subject: str = "someone",
    purposes: tuple[Any, ...] | None = (Purpose.CLIENT_AUTH,), ca: bool = False, depth: int | None = None,
    since: datetime.timedelta = -DAY, until: datetime.timedelta = DAY * 90, key: Any = None,
) -> Made:  # fmt: skip
    """Make a certificate; without an issuer it signs itself."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    builder = x509.CertificateBuilder(
        issuer.certificate.subject if issuer else own, own, key.public_key(), x509.random_serial_number(),
        NOW + since, NOW + until,
    ).add_extension(x509.BasicConstraints(ca, depth), critical=True)  # fmt: skip
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if purposes and not ca:
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    return Made(builder.sign(issuer.key if issuer else key, hashes.SHA256()), key)


def make_ca(issuer: Made | None = None, depth: int | None = 0, **more: Any) -> Made:
    return make(issuer, ca=True, depth=depth, **{"subject": "authority", **more})


ROOT = make_ca()
SERVER = make(ROOT, x509.DNSName("localhost"), subject="federator", purposes=(Purpose.SERVER_AUTH,))


def run(work: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(120.0):
            return await work

    return asyncio.run(limited())


@contextlib.asynccontextmanager
async def listening(hub: Hub, bundle: bytes = b"", server: Made = SERVER) -> Any:
    this, port = transport.make_server(hub, "localhost:0", Credentials(bundle or ROOT.pem, server.pem, server.key_pem))
    await this.start()
    hub.start()
    try:
        yield f"localhost:{port}"
    finally:
        hub.close()
        await this.stop(None)


async def describe(address: str, mine: Made | None, chain: bytes = b"", authority: Made = ROOT) -> str:
    """Return the status with which the federator answers who shows this certificate."""
    shown = (mine.key_pem, mine.pem + chain) if mine else ()
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(
        address, grpc.ssl_channel_credentials(authority.pem, *shown), options
    ) as channel:
        try:
            await channel.unary_unary(f"/{transport.SERVICE}/Describe")(b"")
        except grpc.aio.AioRpcError as error:
            code: str = error.code().name
            return code
    return IN


def cases() -> Iterator[tuple[str, Made | None, bytes, str]]:
    """Yield what is shown to a federator whose ca.pem is ROOT, and what it answers."""

    def case(name: str, expected: str, *names: Any, chain: bytes = b"", issuer: Made | None = ROOT, **more: Any) -> Any:
        return name, make(issuer, *names, **more), chain, expected

    yield case("a client", IN, uri(CLIENT))
    yield case("a follower", IN, uri("urn:cyber0:follower:0"))
    yield case("a client that is a node of Flower, too", IN, uri(CLIENT), uri("urn:flower:node:12"))
    yield case("a client with names of other types", IN, uri(CLIENT), x509.DNSName("urn:cyber0:client:2"))
    yield case("an RSA key", IN, uri(CLIENT), key=rsa.generate_private_key(65537, 2048))
    yield case("no purposes", IN, uri(CLIENT), purposes=None)
    yield case("both purposes", IN, uri(CLIENT), purposes=(Purpose.SERVER_AUTH, Purpose.CLIENT_AUTH))

    yield "no certificate", None, b"", NO_HANDSHAKE
    yield case("expired", NO_HANDSHAKE, uri(CLIENT), until=-DAY / 2)
    yield case("not yet valid", NO_HANDSHAKE, uri(CLIENT), since=DAY)
    yield case("signed by itself", NO_HANDSHAKE, uri(CLIENT), issuer=None)
    yield case("another authority", NO_HANDSHAKE, uri(CLIENT), issuer=make_ca(subject="another"))
    yield case("another authority of the same name", NO_HANDSHAKE, uri(CLIENT), issuer=make_ca())
    other = make_ca(subject="another")
    yield case("another authority, brought along", NO_HANDSHAKE, uri(CLIENT), issuer=other, chain=other.pem)
    yield "the federator's own", SERVER, b"", NO_HANDSHAKE
    yield case("for servers", NO_HANDSHAKE, uri(CLIENT), purposes=(Purpose.SERVER_AUTH,))
    yield case("for signing code", NO_HANDSHAKE, uri(CLIENT), purposes=(Purpose.CODE_SIGNING,))
    friend = make(ROOT, uri(CLIENT))
    yield case("issued by a client", NO_HANDSHAKE, uri(CLIENT), issuer=friend, chain=friend.pem)

    yield case("no names", REFUSED)
    yield case("the name as the subject", REFUSED, subject=CLIENT)
    yield case("two clients", REFUSED, uri(CLIENT), uri("urn:cyber0:client:2"))
    yield case("the same twice", REFUSED, uri(CLIENT), uri(CLIENT))
    yield case("a client and a follower", REFUSED, uri(CLIENT), uri("urn:cyber0:follower:1"))
    yield case("a client and something else of ours", REFUSED, uri(CLIENT), uri("URN:cyber0:master:1"))
    for text in ("07", "-1", "1x", "1 ", "", "1000000000", "1/2", "0x1"):
        yield case(f"number {text!r}", REFUSED, uri(f"urn:cyber0:client:{text}"))
    yield case("another case", REFUSED, uri(CLIENT.upper()))
    yield case("a URI with NUL", REFUSED, uri(f"{CLIENT}\0.example.org"))
    yield case("another URI with NUL", REFUSED, uri(CLIENT), uri("urn:other\0"))
    yield case("a line break", REFUSED, uri(f"{CLIENT}\n"))
    yield case("a DNS name", REFUSED, x509.DNSName(CLIENT))
    yield case("an e-mail address", REFUSED, x509.RFC822Name._init_without_validation(CLIENT))
    yield case("an IP address", REFUSED, x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    common = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CLIENT)])
    yield case("a directory name", REFUSED, x509.DirectoryName(common))
    yield case("another name", REFUSED, x509.OtherName(NameOID.COMMON_NAME, b"\x0c\x13" + CLIENT.encode()))
    between = make_ca(ROOT, None, subject="between")
    yield case("an intermediate authority", REFUSED, uri(CLIENT), issuer=between, chain=between.pem)
    yield case("an authority", REFUSED, uri(CLIENT), ca=True)
    yield "the authority itself", ROOT, b"", REFUSED


def test_of_many_certificates_only_those_of_a_client_or_follower_get_in() -> None:
    async def work() -> None:
        hub = make_hub(4, 2)
        async with listening(hub) as address:
            answers = {}
            for name, mine, chain, expected in cases():
                answer = await describe(address, mine, chain)
                if answer != expected:
                    answers[name] = answer
            assert answers == {}
        assert hub.figures.refused == {"no_identity": sum(case[3] == REFUSED for case in cases())}

    run(work())


def test_an_intermediate_authority_that_is_in_ca_pem_issues_clients() -> None:
    async def work() -> None:
        root = make_ca(depth=1, subject="root")
        between = make_ca(root, subject="between")
        mine, direct = make(between, uri(CLIENT)), make(root, uri(CLIENT))
        server = make(root, x509.DNSName("localhost"), purposes=(Purpose.SERVER_AUTH,))
        async with listening(make_hub(4, 2), root.pem + between.pem, server) as address:
            assert await describe(address, mine, authority=root) == IN
            assert await describe(address, direct, authority=root) == IN
        async with listening(make_hub(4, 2), between.pem, server) as address:
            assert await describe(address, mine, authority=root) == IN
            assert await describe(address, direct, authority=root) != IN

    run(work())


def test_a_purpose_or_an_issuer_that_the_handshake_let_pass_is_judged_again() -> None:
    authority = Authority(ROOT.pem)
    other = make_ca(subject="another")
    assert authority.identity_of(make(ROOT, uri(CLIENT)).pem).client == 1
    server = make(ROOT, uri(CLIENT), purposes=(Purpose.SERVER_AUTH,))
    for mine in (server, make(other, uri(CLIENT)), make(make_ca(), uri(CLIENT))):
        with pytest.raises(Cut, match=r"not for client authentication|not issued directly"):
            authority.identity_of(mine.pem)
    for damaged in (b"", b"nonsense", ROOT.pem[:-40], make(ROOT, uri(CLIENT)).pem.replace(b"MII", b"MIJ", 1)):
        with pytest.raises(Cut, match="can't be read"):
            authority.identity_of(damaged)
    for bundle in (b"", b"nonsense", make(ROOT, uri(CLIENT)).pem):
        with pytest.raises(ConfigError, match=r"ca\.pem"):
            Authority(bundle)


def test_a_client_takes_no_other_participant_for_the_federator() -> None:
    local = x509.DNSName("localhost")
    impostors = {
        "a client": make(ROOT, uri(CLIENT)),
        "a client of that name": make(ROOT, uri(CLIENT), local),
        "of another name": make(ROOT, x509.DNSName("elsewhere"), purposes=(Purpose.SERVER_AUTH,)),
        "of that name as the subject": make(ROOT, uri("urn:x"), subject="localhost", purposes=(Purpose.SERVER_AUTH,)),
        "expired": make(ROOT, local, purposes=(Purpose.SERVER_AUTH,), until=-DAY / 2),
        "of another authority": make(make_ca(), local, purposes=(Purpose.SERVER_AUTH,)),
        "issued by a client": make(make(ROOT, uri(CLIENT)), local, purposes=(Purpose.SERVER_AUTH,)),
    }

    async def work() -> None:
        mine = make(ROOT, uri(CLIENT))
        credentials = Credentials(ROOT.pem, mine.pem, mine.key_pem)
        answers = {}
        for name, server in {"the federator": SERVER, **impostors}.items():
            async with (
                listening(make_hub(4, 2), server=server) as address,
                transport.open_channel(address, credentials, OPENING_LIMIT) as channel,
            ):
                try:
                    await channel.unary_unary(f"/{transport.SERVICE}/Describe")(b"", timeout=20.0)
                    answers[name] = IN
                except grpc.aio.AioRpcError as error:
                    answers[name] = error.code().name
        named = {"of that name as the subject": "UNAUTHENTICATED"}  # refused after the handshake
        assert answers == {"the federator": IN, **dict.fromkeys(impostors, NO_HANDSHAKE), **named}

    run(work())


def test_who_asks_for_the_header_and_who_is_refused_is_logged() -> None:
    lines: list[tuple[str, Any, Any]] = []

    async def work() -> None:
        hub = make_hub(4, 2, log=lambda event, **d: lines.append((event, d.get("client"), d.get("reason"))))
        revoked, nobody = make(ROOT, uri("urn:cyber0:client:2")), make(ROOT, x509.DNSName(CLIENT))
        async with listening(hub) as address:
            hub.revoke(frozenset({"2"}))
            for one in (make(ROOT, uri(CLIENT)), revoked, nobody):
                await describe(address, one)

    run(work())
    assert lines == [("header_sent", 1, None), ("cut_off", 2, "revoked"), ("cut_off", None, "no_identity")]


def test_a_revoked_certificate_may_not_even_ask_what_is_run() -> None:
    async def work() -> None:
        hub = make_hub(4, 2)
        client, follower = make(ROOT, uri(CLIENT)), make(ROOT, uri("urn:cyber0:follower:1"))
        async with listening(hub) as address:
            hub.revoke(frozenset({"1"}))  # client 1, but no follower
            assert [await describe(address, one) for one in (client, follower)] == [REFUSED, IN]
            hub.revoke(frozenset({tls.fingerprint(follower.pem)}))
            assert [await describe(address, one) for one in (client, follower)] == [IN, REFUSED]
        assert hub.figures.refused == {"revoked": 2}

    run(work())


# Expiry.


def test_a_stream_ends_with_its_certificate(tmp_path: Path) -> None:
    async def work() -> None:
        hub = make_hub(4)
        (tmp_path / "config.toml").write_text("")

        def wall_clock() -> float:
            return 1_000_000.0 + asyncio.get_running_loop().time()

        log = make_log(quiet=True)
        revocations = RevocationFile(tmp_path / "revoked.txt", hub, log)
        chores = chores_of(hub, ServerStats(hub, tmp_path, wall_clock), revocations, None, log, wall_clock, wall_clock)
        watching = asyncio.ensure_future(chores.run())
        hub.start()
        short, long = (Pipe(Identity(VOTER, c, "", 1_000_000.0 + end)) for c, end in ((1, 5.0), (2, 500.0)))
        running = [run_voter(hub, Voter(hub.ledger.header, c), pipe) for c, pipe in ((1, short), (2, long))]
        first, second = (asyncio.ensure_future(each) for each in running)
        follower = Pipe(Identity(FOLLOWER, 0, "", 1_000_010.0))
        following = asyncio.ensure_future(hub.serve(follower))
        await follower.up.put(hello_of(hub.ledger.header, 0, role=FOLLOWER))
        await asyncio.sleep(4.0)
        assert not any(each.done() for each in (first, second, following))
        cut = await first
        assert asyncio.get_running_loop().time() < 7.0
        assert cut is not None and (cut.reason, cut.status) == ("expired", "UNAUTHENTICATED")
        assert "expired on 1970-01-12 13:46 UTC" in cut.text and "cyber0 certs" in cut.text
        with pytest.raises(Cut, match="expired on"):
            await following
        await asyncio.sleep(20.0)
        assert not second.done() and hub.figures.refused == {"expired": 2}
        second.cancel()
        watching.cancel()
        await asyncio.gather(second, watching, return_exceptions=True)

    run_virtual(work())


def test_a_call_on_a_connection_that_outlived_its_certificate_is_refused_and_join_says_how_to_renew() -> None:
    from cyber0.serve.join import FederatorConnection, JoinOptions

    def never(header: Any) -> Any:
        raise AssertionError("described to a client whose certificate has expired")

    async def work() -> None:
        hub = make_hub(4, 2)
        mine = make(ROOT, uri(CLIENT), until=DAY)
        service = transport.Service(hub, Authority(ROOT.pem), wall_clock=lambda: (NOW + 2 * DAY).timestamp())
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((service.handlers(),))
        pair = [(SERVER.key_pem, SERVER.pem)]
        port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials(pair, ROOT.pem, True))
        await server.start()
        options = JoinOptions(f"localhost:{port}", Credentials(ROOT.pem, mine.pem, mine.key_pem), 1)
        with pytest.raises(
            ProtocolError, match=r"refused: this certificate or its authority expired on .* `cyber0 certs`"
        ):
            await FederatorConnection(options, make_log(quiet=True)).take_part(never)
        await server.stop(None)
        assert hub.figures.refused == {"expired": 1}

    run(work())


def test_a_certificate_is_valid_no_longer_than_its_authority() -> None:
    old, new = make_ca(until=DAY * 30), make_ca()
    leaf = make(old, uri(CLIENT))
    assert Authority(old.pem + new.pem).identity_of(leaf.pem).expires == (NOW + DAY * 30).timestamp()
    renewed = make_ca(until=DAY * 300, key=old.key)
    assert Authority(old.pem + renewed.pem).identity_of(leaf.pem).expires == (NOW + DAY * 90).timestamp()


def test_who_starts_with_a_certificate_that_expires_soon_is_warned_and_with_an_expired_one_refused() -> None:
    def warning(mine: Made, authority: Made, days: float) -> str:
        return expiry_warning(Credentials(authority.pem, mine.pem, mine.key_pem), (NOW + DAY * days).timestamp())

    mine = make(ROOT, uri(CLIENT), subject="client 1", until=DAY * 60)
    assert warning(mine, ROOT, 0.0) == warning(mine, ROOT, 45.9) == ""
    assert "the certificate CN=client 1 expires on" in warning(mine, ROOT, 46.5) and "13 days" in warning(
        mine, ROOT, 46.5
    )
    with pytest.raises(ConfigError, match=r"the certificate CN=client 1 expired on .* `cyber0 certs` where ca.key is"):
        warning(mine, ROOT, 60.0)
    brief = make_ca(until=DAY * 20)
    for until, what in ((10, "certificate CN=someone"), (20, "authority CN=authority in ca.pem"), (30, "authority")):
        issued = make(brief, uri(CLIENT), until=DAY * until)
        text = warning(issued, brief, 9.5)
        assert f"the {what}" in text and f"in {min(until, 20) - 10} days: make a new authority, and new" in text
    with pytest.raises(ConfigError, match=r"the authority .* in ca\.pem expired on .*: make a new authority"):
        warning(issued, brief, 21.0)
    assert warning(issued, ROOT, 10.0) == ""  # issued by another authority: the other side judges


def test_an_authority_that_has_expired_makes_no_more_certificates(tmp_path: Path) -> None:
    tls.make(tmp_path, clients=[], hosts=[], days=0)
    with pytest.raises(ConfigError, match=r"the authority .*ca\.pem expired on .*: make a new one in another folder"):
        tls.make(tmp_path, clients=[0], hosts=[])


@pytest.mark.skipif(os.name != "posix", reason="Windows has other permissions")
def test_a_private_key_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    tls.make(tmp_path, clients=[0], hosts=["localhost"])
    for name in ("server", "client-0"):
        for mode, fine in ((0o600, True), (0o640, True), (0o400, True), (0o644, False), (0o602, False), (0o601, False)):
            (tmp_path / f"{name}.key").chmod(mode)
            if fine:
                tls.load(tmp_path, name)
                continue
            with pytest.raises(ConfigError, match=rf"{name}\.key .*\(mode {mode:04o}\): chmod 600 .*{name}\.key"):
                tls.load(tmp_path, name)
    (tmp_path / "ca.key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"ca\.key .*\(mode 0644\): chmod 600"):
        tls.make(tmp_path, clients=[1], hosts=[])
