"""Identities as files: a private authority and the certificates that it makes. What they prove is in identity.py.

    ca.pem, ca.key                  the authority; whoever has ca.key can make any identity
    server.pem, server.key          the federator
    client-7.pem, client-7.key      client 7; one vote
    follower-0.pem, follower-0.key  a follower; no vote

The identity is a URI among the certificate's alternative names: urn:cyber0:client:7, urn:cyber0:follower:0.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
import re
import ssl
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from cyber0.errors import ConfigError
from cyber0.serve.operations import date_of

if TYPE_CHECKING:
    from cryptography import x509

AUTHORITY, SERVER = "ca", "server"
_FILE = re.compile(r"(client|follower)-(0|[1-9][0-9]{0,8})\.pem")


class Credentials(NamedTuple):
    """One side's certificate and key, and the authority that the other side's must come from; all PEM."""

    authority: bytes
    certificate: bytes
    key: bytes


def fingerprint(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate (PEM) as `openssl x509 -fingerprint -sha256` shows it, without colons."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.decode("ascii", "replace"))).hexdigest()


def load(folder: Path, name: str) -> Credentials:
    """Read one side's files; `name` is "server", "client-7", ..."""
    return Credentials(
        _read(folder / f"{AUTHORITY}.pem"), _read(folder / f"{name}.pem"), _read_key(folder / f"{name}.key")
    )


def find(folder: Path, role: str, number: int | None) -> tuple[str, int]:
    """Return the file name and the number of the identity to use: the given one, or the only one in the folder."""
    if number is not None:
        return f"{role}-{number}", number
    found = [match for file in sorted(folder.glob(f"{role}-*.pem")) if (match := _FILE.fullmatch(file.name))]
    if len(found) != 1:
        raise ConfigError(
            f"{folder} holds {len(found)} certificates of a {role}: put in one {role}-NUMBER.pem with its .key, or "
            f"choose one by --{role} NUMBER"
        )
    return found[0][0].removesuffix(".pem"), int(found[0][2])


def check_hosts(folder: Path, hosts: Sequence[str]) -> None:
    """Refuse hosts that the federator's existing certificate is not for: it would not be replaced."""
    from cryptography import x509

    path = folder / f"{SERVER}.pem"
    if not path.exists():
        return
    names = x509.load_pem_x509_certificate(_read(path)).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    if missing := [host for host in hosts if _host(host) not in names.value]:
        raise ConfigError(
            f"{path} exists and is not for {', '.join(missing)}: move it and its .key away to have one made "
            "for every --host"
        )


def make(
    folder: Path, *, clients: Sequence[int], followers: Sequence[int] = (), hosts: Sequence[str], days: int = 365,
    also: Mapping[int, str] = MappingProxyType({}),
) -> list[Path]:  # fmt: skip
    """Make what does not exist yet: the authority, the federator's certificate for these hosts, identities.

    `also` has a second URI for the certificates of some clients: who they are in another system.

    Returns:
        The certificates that were made.
    """
    wanted: dict[str, list[Any]] = {
        SERVER: [_host(host) for host in hosts]
    }  # refuses a bad one before anything is made
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {folder} can't be created: {error.strerror}") from None
    authority = _Authority(folder, days)
    for n in clients:
        wanted[f"client-{n}"] = [_uri(f"urn:cyber0:client:{n}"), *([_uri(also[n])] if n in also else [])]
    for n in followers:
        wanted[f"follower-{n}"] = [_uri(f"urn:cyber0:follower:{n}")]
    missing = {name: names for name, names in wanted.items() if not (folder / f"{name}.pem").exists()}
    for name, names in missing.items():
        authority.issue(name, names)
    return [folder / f"{name}.pem" for name in missing]


class _Authority:
    """The private authority of a folder, made if there is none."""

    def __init__(self, folder: Path, days: int) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization

        self._folder, self._days = folder, days
        certificate, key = folder / f"{AUTHORITY}.pem", folder / f"{AUTHORITY}.key"
        if certificate.exists() != key.exists():
            raise ConfigError(f"{folder} has only one of {certificate.name} and {key.name}: identities need both")
        if certificate.exists():
            loaded: Any = serialization.load_pem_private_key(_read_key(key), None)
            issuer = x509.load_pem_x509_certificate(_read(certificate))
            if issuer.not_valid_after_utc <= datetime.datetime.now(datetime.UTC):
                raise ConfigError(
                    f"the authority {certificate} expired on {date_of(issuer.not_valid_after_utc.timestamp())}: make a "
                    "new one in another folder; everybody needs its ca.pem and a new certificate"
                )
            self._key, self._name = loaded, issuer.subject
            return
        self._key = _new_key()
        self._name = _subject("cyber0 authority")
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = self._builder(self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._write(AUTHORITY, builder.add_extension(usage, critical=True), self._key)

    def issue(self, name: str, names: list[Any]) -> None:
        """Make a key and a certificate with these alternative names."""
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = _new_key()
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if name == SERVER else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = self._builder(_subject(f"cyber0 {name}"), key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        self._write(name, builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False), key)

    def _builder(self, subject: x509.Name, key: Any) -> x509.CertificateBuilder:
        from cryptography import x509

        now = datetime.datetime.now(datetime.UTC)
        return x509.CertificateBuilder(
            issuer_name=self._name, subject_name=subject, public_key=key, serial_number=x509.random_serial_number(),
            not_valid_before=now - datetime.timedelta(minutes=5),  # clocks differ a little
            not_valid_after=now + datetime.timedelta(days=self._days),
        )  # fmt: skip

    def _write(self, name: str, builder: x509.CertificateBuilder, key: Any) -> None:
        from cryptography.hazmat.primitives import hashes, serialization

        certificate = builder.sign(self._key, hashes.SHA256())
        pem = serialization.Encoding.PEM
        plain = serialization.NoEncryption()
        _write(self._folder / f"{name}.key", key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain), 0o600)
        _write(self._folder / f"{name}.pem", certificate.public_bytes(pem), 0o644)


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _subject(name: str) -> x509.Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])


def _uri(text: str) -> Any:
    from cryptography import x509

    return x509.UniformResourceIdentifier(text)


def _host(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if ":" in host or "/" in host:
            raise ConfigError(f"--host {host}: a certificate is for a name or an address, without a port or a path; "
                              f"give --host {host.split('//')[-1].split('/')[0].split(':')[0]}") from None  # fmt: skip
        return x509.DNSName(host)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}; `cyber0 certs` makes certificates") from None


def _read_key(path: Path) -> bytes:
    """Read a private key; refuse one that everybody on this machine may read or replace.

    A group may: keys that a service reads often belong to another user and the service's group.
    """
    key = _read(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name == "posix" and mode & stat.S_IRWXO:
        raise ConfigError(
            f"the private key {path} is open to every user of this machine (mode {mode:04o}): chmod 600 {path}, and "
            "have a new one made if somebody may have read it"
        )
    return key


def _write(path: Path, data: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
