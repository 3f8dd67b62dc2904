"""The identity that a participant's certificate proves, and how long a certificate is valid.

gRPC has verified that a caller holds the key of a certificate that leads to one in ca.pem. What else has to hold is
judged here, on the certificate itself: gRPC lists alternative names without their types, so that a DNS name or an
e-mail address looks like a URI, and cuts them off at NUL; and it accepts intermediate authorities that the caller
brings along, also below an authority that may have none.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from cyber0.errors import ConfigError
from cyber0.protocol.messages import FOLLOWER, VOTER
from cyber0.serve.admission import Cut, Identity
from cyber0.serve.operations import date_of
from cyber0.serve.tls import Credentials

if TYPE_CHECKING:
    from cryptography import x509

ROLE_CODES = {"client": VOTER, "follower": FOLLOWER}
WARNING_DAYS = 14
_OURS = "urn:cyber0:"
_URI = re.compile(r"urn:cyber0:(client|follower):(0|[1-9][0-9]{0,8})")
_CACHED = 4096
_DAY_SECONDS = 86_400.0
_RENEWAL = "for a new one, move its .pem and .key away and run `cyber0 certs` where ca.key is"


class Authority:
    """The certificates in ca.pem, which issue those of the participants."""

    def __init__(self, bundle: bytes) -> None:
        self._issuers = _authorities(bundle)
        self._judge = lru_cache(_CACHED)(self._judge_anew)  # participants reconnect, all of them at once at times

    def identity_of(self, certificate: bytes) -> Identity:
        """Return the identity in a certificate (PEM) that gRPC has verified; raises `Cut` if it proves none."""
        judged = self._judge(certificate)
        if isinstance(judged, str):
            raise Cut("no_identity", "PERMISSION_DENIED", judged)
        return judged

    def _judge_anew(self, pem: bytes) -> Identity | str:
        """Return the identity, or why there is none."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        try:
            certificate = x509.load_pem_x509_certificate(pem)
            if fault := _unfit(certificate):
                return fault
            names = _names(certificate)
        except Exception as error:  # broad: the certificate may be malformed in any way, and each raises its own error
            return f"the certificate can't be read: {error}"
        until = [_end_of(issuer) for issuer in self._issuers if _issued(certificate, issuer)]
        if not until:
            return (
                "the certificate is not issued directly by one in the federator's ca.pem; an intermediate authority "
                "has to be put into that file"
            )
        match = _URI.fullmatch(names[0]) if len(names) == 1 else None
        if match is None:
            return "the certificate names no client or follower of cyber0, or more than one"
        expires = min(_end_of(certificate), max(until))
        fingerprint = certificate.fingerprint(hashes.SHA256()).hex()
        return Identity(ROLE_CODES[match[1]], int(match[2]), fingerprint, expires)


def _authorities(bundle: bytes) -> list[x509.Certificate]:
    from cryptography import x509

    try:
        found = [one for one in x509.load_pem_x509_certificates(bundle) if _is_authority(one)]
    except ValueError as error:
        raise ConfigError(f"ca.pem can't be read: {error}; it holds certificates in PEM") from None
    if not found:
        raise ConfigError("ca.pem holds no certificate of an authority (basic constraints CA:TRUE)")
    return found


def _unfit(certificate: x509.Certificate) -> str:
    """Return why a certificate is none of a participant; empty if it may be one."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    if _is_authority(certificate):
        return "the certificate is that of an authority, not of a participant"
    try:
        purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return ""  # for any purpose
    if ExtendedKeyUsageOID.CLIENT_AUTH in purposes:
        return ""
    return "the certificate is not for client authentication: its extended key usage names other purposes only"


def _is_authority(certificate: x509.Certificate) -> bool:
    from cryptography import x509

    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _names(certificate: x509.Certificate) -> list[str]:
    """Return the URIs among the alternative names that are meant for cyber0. Other types of names never count."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if not all(uri.isprintable() for uri in uris):  # others may read such a URI as a shorter one
        raise ValueError("a URI among its alternative names holds control characters")
    return [uri for uri in uris if uri.lower().startswith(_OURS)]


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def expiry_warning(mine: Credentials, now: float) -> str:
    """Return a warning if a side's own certificate, or the authority that issued it, expires soon; empty if not.

    Raises `ConfigError` if one of them has expired. `now` is in seconds since 1970.
    """
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(mine.certificate)
    except ValueError as error:
        raise ConfigError(f"the certificate can't be read: {error}; `cyber0 certs` makes certificates") from None
    issuers = [issuer for issuer in _authorities(mine.authority) if _issued(certificate, issuer)]
    issuer = max(issuers, key=_end_of, default=None)
    soon, remedy = now + WARNING_DAYS * _DAY_SECONDS, _RENEWAL
    first, what = certificate, f"the certificate {certificate.subject.rfc4514_string()}"
    if issuer is not None and _end_of(issuer) < soon:  # a new certificate would expire with it
        remedy = "make a new authority, and new certificates for everybody, with `cyber0 certs` in another folder"
    if issuer is not None and _end_of(issuer) <= _end_of(certificate):
        first, what = issuer, f"the authority {issuer.subject.rfc4514_string()} in ca.pem"
    end = _end_of(first)
    if end <= now:
        raise ConfigError(f"{what} expired on {date_of(end)} by this machine's clock: {remedy}")
    days = int((end - now) // _DAY_SECONDS)
    return f"{what} expires on {date_of(end)}, in {days} days: {remedy}" if end < soon else ""


def expiration(identity: Identity) -> Cut:
    """Return why a participant is cut off whose certificate has expired."""
    text = f"this certificate or its authority expired on {date_of(identity.expires)}: {_RENEWAL}, then join again"
    return Cut("expired", "UNAUTHENTICATED", text)


def _end_of(certificate: x509.Certificate) -> float:
    """Return when a certificate expires, in seconds since 1970."""
    return certificate.not_valid_after_utc.timestamp()
