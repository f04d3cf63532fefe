"""A federation's folder, keys and processes; the whole of it on loopback, slowly."""

from __future__ import annotations

import datetime
import json
import os
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedshift.deploy.federation import join
from fedshift.deploy.keys import check_certificate, write_authority, write_client_key
from fedshift.deploy.place import clients_of, make_place
from fedshift.deploy.processes import check_port, free_port, running, wait_for
from fedshift.errors import FedshiftError, InputError

ROOT = Path(__file__).parents[1]


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_the_servers_certificate_is_the_authoritys(tmp_path: Path) -> None:
    write_authority(tmp_path, ["localhost", "192.0.2.7"], days=30)
    root, leaf = certificate(tmp_path / "ca.crt"), certificate(tmp_path / "server.crt")
    leaf.verify_directly_issued_by(root)
    named = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert named.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(a) for a in named.get_values_for_type(x509.IPAddress)] == ["192.0.2.7"]
    usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
    left = leaf.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert 29 <= left.days < 30
    for name in ("ca.key", "server.key"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0
    with pytest.raises(InputError, match=r"ca.key: cannot be written: File exists"):
        write_authority(tmp_path, ["localhost"])


def test_a_clients_key_is_openssh_on_p384(tmp_path: Path) -> None:
    write_client_key(tmp_path / "key")
    key = load_ssh_private_key((tmp_path / "key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    assert (tmp_path / "key.pub").read_text().startswith("ecdsa-sha2-nistp384 ")
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file or directory; make it with `fedshift depl"):
        check_certificate(tmp_path / "ca.crt")
    (tmp_path / "odd.crt").write_text("hello")
    with pytest.raises(InputError, match="odd.crt: not a certificate; make it with"):
        check_certificate(tmp_path / "odd.crt")
    write_authority(tmp_path, ["localhost"], days=0)
    with pytest.raises(InputError, match=r"server.crt: valid from .* and today is 20"):
        check_certificate(tmp_path / "server.crt")


def test_the_folder_of_a_federation(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    make_place(folder, 'name = "x"\n', 2, ["localhost"])
    assert [place.name for place in clients_of(folder)] == ["client-0", "client-1"]
    for i, place in enumerate(clients_of(folder)):
        assert json.loads((place / "client.json").read_text()) == {"partition": i, "partitions": 2}
        assert sorted(p.name for p in place.iterdir()) == [
            "ca.crt",
            "client.json",
            "key",
            "key.pub",
        ]
    app = tomllib.loads((folder / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["config"]["experiment"] == 'name = "x"\n'
    with pytest.raises(InputError, match="exists and is not an empty folder"):
        make_place(folder, "", 2, ["localhost"])


def test_a_port_in_use() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        with pytest.raises(InputError, match=rf"127.0.0.1:{port} cannot be opened: .*give --port"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", free_port())


def test_processes_end_with_their_children(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    with running([sys.executable, "-c", code], os.environ, tmp_path / "log"):
        for _ in range(200):
            if (tmp_path / "child").exists() and (tmp_path / "child").read_text():
                break
            time.sleep(0.05)
        child = int((tmp_path / "child").read_text())
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the child is still there")


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    code = "print('no certificate'); raise SystemExit(3)"
    with (
        running([sys.executable, "-c", code], os.environ, tmp_path / "log") as process,
        pytest.raises(FedshiftError, match="ended with 3: no certificate"),
    ):
        wait_for("127.0.0.1", free_port(), process, tmp_path / "log")


def test_clients_that_cannot_join(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no client's folder; give one of clients/client-0"):
        join(tmp_path, "127.0.0.1:8000")
    folder = tmp_path / "f"
    make_place(folder, "", 1, ["localhost"])
    with pytest.raises(InputError, match='server "here": write it as host:port'):
        join(folder / "clients" / "client-0", "here")
    (folder / "clients" / "client-0" / "ca.crt").unlink()
    with pytest.raises(InputError, match=r"ca.crt: cannot be read"):
        join(folder / "clients" / "client-0", "127.0.0.1:8000")


def ran(*args: str, cwd: Path) -> Any:
    return subprocess.run(args, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_federation_on_loopback(tmp_path: Path) -> None:
    """One server, three clients, TLS and keys: the run folder of one process, bit for bit."""
    fedshift = str(Path(sys.executable).with_name("fedshift"))
    example = ROOT / "examples" / "loopback"
    there = ran(sys.executable, str(example / "run.py"), "--out", "there", cwd=tmp_path)
    assert there.returncode == 0, there.stderr
    here = ran(fedshift, "run", str(example / "experiment.toml"), "--out", "here", cwd=tmp_path)
    table = here.stdout.split("gap to T:")[0]
    assert table.strip() in there.stdout
    for name in ("summary.json", "model.safetensors", "metrics.csv", "clients.csv", "lock.json"):
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()
