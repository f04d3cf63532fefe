"""The certificates of a federation pass the strict checks of RFC 5280 that Python 3.13 makes."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from fedshift.errors import InputError
from fedshift_deploy.keys import check_certificate, check_server, write_authority

AKI, SKI = x509.AuthorityKeyIdentifier, x509.SubjectKeyIdentifier


def without(folder: Path, name: str, *extensions: type[x509.ExtensionType]) -> None:
    """Sign a certificate of a federation again, without these extensions."""
    path = folder / f"{name}.crt"
    old = x509.load_pem_x509_certificate(path.read_bytes())
    key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    new = x509.CertificateBuilder(
        old.issuer, old.subject, old.public_key(), old.serial_number,
        old.not_valid_before_utc, old.not_valid_after_utc,
        [e for e in old.extensions if not isinstance(e.value, extensions)],
    )  # fmt: skip
    path.write_bytes(new.sign(key, hashes.SHA384()).public_bytes(Encoding.PEM))


def strict_handshake(folder: Path) -> str:
    """The error of a strict client about the server's certificate; "" for none."""
    strict = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    strict.verify_flags |= ssl.VERIFY_X509_STRICT
    shows = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shows.load_cert_chain(folder / "server.crt", folder / "server.key")
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            shows.wrap_socket(theirs, server_side=True).close()
        except OSError:
            theirs.close()

    server = threading.Thread(target=serve)
    server.start()
    try:
        with strict.wrap_socket(ours, server_hostname="localhost"):
            return ""
    except ssl.SSLCertVerificationError as e:
        return e.verify_message
    finally:
        server.join(10)


def test_a_strict_handshake(tmp_path: Path) -> None:
    write_authority(tmp_path, ["localhost"])
    assert strict_handshake(tmp_path) == ""


@pytest.mark.parametrize(
    ("name", "extension", "answer"),
    [
        ("server", AKI, "Missing Authority Key Identifier"),
        ("ca", SKI, "Missing Subject Key Identifier"),
        ("ca", x509.KeyUsage, "Path length given without key usage keyCertSign"),
    ],
)
def test_what_a_certificate_lacks_is_named(
    name: str,
    extension: type[x509.ExtensionType],
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OpenSSL's strict check and ours report the same; without the strict check both accept."""
    write_authority(tmp_path, ["localhost"])
    without(tmp_path, name, extension)
    assert strict_handshake(tmp_path) == answer
    monkeypatch.setattr("fedshift_deploy.keys.STRICT", False)
    check_server(tmp_path)
    monkeypatch.setattr("fedshift_deploy.keys.STRICT", True)
    with pytest.raises(InputError, match=rf"{name}.crt: has no .*`fedshift deploy renew`"):
        check_server(tmp_path)


def test_certificates_of_older_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lack all three extensions: one sentence says so, with the cure."""
    write_authority(tmp_path, ["localhost"])
    monkeypatch.setattr("fedshift_deploy.keys.STRICT", True)
    check_server(tmp_path)
    without(tmp_path, "ca", AKI, SKI, x509.KeyUsage)
    with pytest.raises(InputError) as error:
        check_certificate(tmp_path / "ca.crt")
    assert str(error.value) == (
        f"{tmp_path}/ca.crt: has no Subject Key Identifier and no Key Usage, and Python 3.13 and "
        "later refuse such certificates; run `fedshift deploy renew` on the server, and hand out "
        "the ca.crt that it makes"
    )


def test_extensions(tmp_path: Path) -> None:
    """RFC 5280: 4.2.1.1 to 4.2.1.3, 4.2.1.9 and 4.2.1.12."""
    write_authority(tmp_path, ["localhost"])
    root, leaf = (
        x509.load_pem_x509_certificate((tmp_path / name).read_bytes()).extensions
        for name in ("ca.crt", "server.crt")
    )
    for extensions, ca in ((root, True), (leaf, False)):
        basic = extensions.get_extension_for_class(x509.BasicConstraints)
        usage = extensions.get_extension_for_class(x509.KeyUsage)
        assert (basic.critical, basic.value.ca) == (True, ca)
        assert (usage.critical, usage.value.key_cert_sign) == (True, ca)
        assert usage.value.digital_signature is not ca
        key = root.get_extension_for_class(SKI).value.digest
        assert extensions.get_extension_for_class(AKI).value.key_identifier == key
    assert leaf.get_extension_for_class(SKI).value.digest != key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_verifies_them_strictly(tmp_path: Path) -> None:
    def verified() -> tuple[int, str]:
        command = ["openssl", "verify", "-x509_strict", "-CAfile", "ca.crt", "server.crt"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    write_authority(tmp_path, ["localhost"])
    assert verified() == (0, "server.crt: OK\n")
    without(tmp_path, "server", AKI)
    code, answer = verified()
    assert code
    assert "Missing Authority Key Identifier" in answer
