"""Certificates for TLS and keys for clients, in the forms that Flower needs."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedshift.errors import InputError

# Days that a server's certificate is valid. The authority's is valid for so many times as long, so
# that clients need no new one each year.
DAYS, LIVES = 365, 10
# Certificates are valid from so long before now, because clocks of other machines may be behind.
EARLIER = datetime.timedelta(minutes=5)
MINUTES = "%Y-%m-%d %H:%M"
AGAIN = "take the one that `fedshift deploy init` made, or run that into a new folder"
# From this version on Python checks certificates fully by RFC 5280 (ssl.VERIFY_X509_STRICT).
STRICT = sys.version_info >= (3, 13)


def write_authority(folder: Path, hosts: Sequence[str], *, days: int = DAYS) -> None:
    """Write ca.crt and ca.key, and server.crt and server.key for these host names and addresses.

    The server's certificate is for server authentication, valid for `days` from today (the
    authority's for `LIVES` times as many). Both have the extensions that RFC 5280 (4.2.1) demands.
    Only their owner can read the private keys. Raises InputError for a host that is neither a name
    nor an address, and if a file exists or cannot be written.
    """
    # The curve that Flower's documentation uses for clients' keys.
    authority = ec.generate_private_key(ec.SECP384R1())
    # Do this first: it checks the hosts, and no file may be left if one is invalid.
    key, certificate = _make_server_certificate(authority, hosts, days)
    _write(folder / "ca.key", _pem(authority), 0o600)
    _write(folder / "ca.crt", _make_root_certificate(authority, LIVES * days), 0o644)
    _write(folder / "server.key", key, 0o600)
    _write(folder / "server.crt", certificate, 0o644)


def renew_server(folder: Path, hosts: Sequence[str] = (), *, days: int = DAYS) -> bool:
    """Write a new server.key and server.crt of the same authority; True if ca.crt is new, too.

    hosts: as in `write_authority`; those of the present certificate if left out. The authority's
    certificate is renewed, with its present key, if it would end before the server's, or lacks an
    extension that TLS needs. Clients must then get the new one before the old one ends. Raises
    InputError for files that cannot be read or written.
    """
    authority = _read_authority_key(folder / "ca.key")
    root, leaf = _read_certificate(folder / "ca.crt"), _read_certificate(folder / "server.crt")
    if not hosts:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = [str(name.value) for name in names]
    key, certificate = _make_server_certificate(authority, hosts, days)
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    old = root.not_valid_after_utc < end or bool(_missing_extensions(root))
    if old:
        _replace(folder / "ca.crt", _make_root_certificate(authority, LIVES * days), 0o644)
    # A crash between these two leaves a pair that `check_server` refuses; the next call repairs it.
    _replace(folder / "server.key", key, 0o600)
    _replace(folder / "server.crt", certificate, 0o644)
    return old


def write_client_key(path: Path) -> None:
    """Write a client's key pair, `path` and `path`.pub, in OpenSSH's format, replacing any."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _replace(path, _pem(key, PrivateFormat.OpenSSH), 0o600)
    _replace(path.with_name(path.name + ".pub"), public + b"\n", 0o644)


def check_certificate(path: Path) -> None:
    """Raise InputError for a certificate that is missing, unreadable, or not valid today.

    On Python 3.13 and later also for one without the extensions that its TLS demands.
    """
    certificate = _read_certificate(path)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    now = datetime.datetime.now(datetime.UTC)
    if not first <= now <= last:
        raise InputError(
            f"{path}: valid from {first:{MINUTES}} to {last:{MINUTES}} UTC, and this machine's "
            f"clock says {now:{MINUTES}}: set the clock if it is wrong. Else run `fedshift deploy "
            "renew` on the server, and hand out the ca.crt that it makes"
        )
    if STRICT and (missing := _missing_extensions(certificate)):
        raise InputError(
            f"{path}: has no {missing}, and Python 3.13 and later refuse such certificates; run "
            "`fedshift deploy renew` on the server, and hand out the ca.crt that it makes"
        )


def certificate_end(path: Path) -> float:
    """When a certificate ends, in seconds since 1970. Raises InputError for other files."""
    return _read_certificate(path).not_valid_after_utc.timestamp()


def check_server(folder: Path) -> None:
    """Raise InputError if the server's certificate or key cannot be used.

    Both certificates must be valid today, the authority must have signed the server's, and
    server.key must belong to it.
    """
    for name in ("ca.crt", "server.crt"):
        check_certificate(folder / name)
    authority, certificate, key = folder / "ca.crt", folder / "server.crt", folder / "server.key"
    _read_bytes(key)
    try:
        _read_certificate(certificate).verify_directly_issued_by(_read_certificate(authority))
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (ValueError, TypeError, InvalidSignature):
        raise InputError(f"{certificate}: not signed by {authority}; {AGAIN}") from None
    except ssl.SSLError:
        raise InputError(f"{key}: not the key of {certificate}; {AGAIN}") from None


def valid_until(path: Path) -> datetime.date:
    """The last day of a certificate. Raises InputError for other files."""
    return _read_certificate(path).not_valid_after_utc.date()


def check_client_key(path: Path) -> None:
    """Raise InputError unless the file holds a client's private key."""
    content = _read_bytes(path)
    try:
        key = load_ssh_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InputError(f"{path}: not a private key without a password; {AGAIN}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"{path}: not a key on an elliptic curve; {AGAIN}")


def check_pair(path: Path) -> None:
    """Raise InputError if a client's private key does not belong to `path`.pub, if that exists."""
    public = path.with_name(f"{path.name}.pub")
    check_client_key(path)
    if not public.is_file():
        return
    key = load_ssh_private_key(_read_bytes(path), None).public_key()
    if key != read_client_key(public)[1]:
        raise InputError(
            f"{path}: not the key of {public}, which the server knows; take both from one folder "
            "of the server's, or have `fedshift deploy renew --client I` make a new pair there"
        )


def read_client_key(path: Path) -> tuple[bytes, ec.EllipticCurvePublicKey]:
    """(a client's public key as its SuperNode sends it, in PEM; the key). Raises InputError."""
    try:
        key = load_ssh_public_key(_read_bytes(path))
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(f"{path}: not a public key; {AGAIN}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InputError(f"{path}: not a key on an elliptic curve; {AGAIN}")
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), key


def _read_bytes(path: Path) -> bytes:
    """The contents of a file. Raises InputError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as e:
        raise InputError(f"{path}: cannot be read: {e.strerror}; {AGAIN}") from None


def _read_certificate(path: Path) -> x509.Certificate:
    content = _read_bytes(path)
    try:
        return x509.load_pem_x509_certificate(content)
    except ValueError:
        raise InputError(f"{path}: not a certificate; {AGAIN}") from None


def _missing_extensions(certificate: x509.Certificate) -> str:
    """Names of extensions that a certificate lacks for OpenSSL's strict check; "" for none."""
    root = certificate.subject == certificate.issuer
    wanted = (x509.SubjectKeyIdentifier, x509.KeyUsage) if root else (x509.AuthorityKeyIdentifier,)
    present = {type(extension.value) for extension in certificate.extensions}
    # "Subject Key Identifier" for SubjectKeyIdentifier, as in OpenSSL's messages.
    names = [re.sub(r"(?<=[a-z])(?=[A-Z])", " ", w.__name__) for w in wanted if w not in present]
    return " and no ".join(names)


def _read_authority_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_pem_private_key(_read_bytes(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InputError(f"{path}: not a private key without a password; {AGAIN}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"{path}: not a key on an elliptic curve; {AGAIN}")
    return key


def _pem(key: ec.EllipticCurvePrivateKey, form: PrivateFormat = PrivateFormat.PKCS8) -> bytes:
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


def _make_root_certificate(authority: ec.EllipticCurvePrivateKey, days: int) -> bytes:
    """The authority's certificate, which it signs itself."""
    builder = (
        _builder(_AUTHORITY, authority, authority.public_key(), days)
        # path_length=0: it may sign servers, but no other authority.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
    )
    return builder.sign(authority, hashes.SHA384()).public_bytes(Encoding.PEM)


def _make_server_certificate(
    authority: ec.EllipticCurvePrivateKey, hosts: Sequence[str], days: int
) -> tuple[bytes, bytes]:
    """A new key and its certificate for these hosts."""
    key = ec.generate_private_key(ec.SECP384R1())
    names = x509.SubjectAlternativeName([_general_name(h) for h in hosts])
    builder = (
        _builder("fedshift server", key, authority.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        # A key on an elliptic curve only signs the handshake; it never encrypts.
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(names, critical=False)
    )
    return _pem(key), builder.sign(authority, hashes.SHA384()).public_bytes(Encoding.PEM)


def _usage(*allowed: str) -> x509.KeyUsage:
    """The extension that allows a certificate's key these uses and no others."""
    every = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
        "key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{name: name in allowed for name in every})


def _builder(
    subject: str, key: ec.EllipticCurvePrivateKey, issuer: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    """An unsigned certificate for `key`, to be signed by the authority, whose key is `issuer`."""
    start = datetime.datetime.now(datetime.UTC) - EARLIER
    # (subject, issuer); they are equal for the authority's own certificate.
    names = [[x509.NameAttribute(NameOID.COMMON_NAME, name)] for name in (subject, _AUTHORITY)]
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name(names[0]))
        .issuer_name(x509.Name(names[1]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
    )


_AUTHORITY = "fedshift federation"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")


def _general_name(host: str) -> x509.GeneralName:
    """A host as a certificate names it. Raises InputError if it is no name and no address."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _NAME.fullmatch(host):
            raise InputError(
                f'host "{host}": give a name, as fed.example.org, or an address, as 192.0.2.7, '
                "without a port"
            ) from None
        return x509.DNSName(host)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a new file; never replace an existing one."""
    try:
        # Set the mode on creation, so that others cannot read a private key even for a moment.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as f:
            f.write(content)
    except OSError as e:
        raise InputError(f"{path}: cannot be written: {e.strerror}") from None


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Replace a file atomically."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    _write(new, content, mode)
    new.replace(path)
