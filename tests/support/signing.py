"""HTTP headers with which a SuperNode proves that it has its key."""

from __future__ import annotations

import base64
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from fedshift_deploy.keys import read_client_key


def signed(folder: Path, claim: Path | None = None) -> list[tuple[bytes, bytes]]:
    """A SuperNode's headers, signed with one key and claiming another (`claim`)."""
    key = load_ssh_private_key((folder / "key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    now = b"2026-01-01T00:00:00+00:00"
    pem, _ = read_client_key((claim or folder) / "key.pub")
    signature = key.sign(now, ec.ECDSA(hashes.SHA256()))
    return [
        (b"flwr-public-key", base64.b64encode(pem)),
        (b"flwr-signature", base64.b64encode(signature)),
        (b"flwr-timestamp", now),
    ]
