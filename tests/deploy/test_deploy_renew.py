"""Renewal of certificates and keys: which clients need new files, and which are refused."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift.cli.app import app
from fedshift.cli.ending import perform
from fedshift.errors import InputError
from fedshift_deploy.keys import check_certificate, check_server, read_client_key, write_authority
from fedshift_deploy.place import clients_of, make_place
from fedshift_deploy.reaching import answers
from support.tls import tls_server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_place(tmp_path / "f", 'name = "x"\n', 2, ["localhost", "127.0.0.1"])
    return tmp_path / "f"


def names(certificate: Path) -> set[str]:
    shown = ssl._ssl._test_decode_cert(str(certificate))  # type: ignore[attr-defined]
    return {value for _, value in shown["subjectAltName"]}


def test_a_new_server_certificate_for_clients_as_they_are(folder: Path) -> None:
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.parent != folder}
    old = (folder / "server.crt").read_bytes(), (folder / "server.key").read_bytes()
    assert perform(app, ["deploy", "renew", str(folder)]) == 0
    assert (folder / "server.crt").read_bytes() != old[0]
    assert (folder / "server.key").read_bytes() != old[1]
    assert (folder / "server.key").stat().st_mode & 0o077 == 0
    assert names(folder / "server.crt") == {"localhost", "127.0.0.1"}
    check_server(folder)
    # No file of a client has changed, and its copy of ca.crt vouches for the new one.
    assert {p: p.read_bytes() for p in before} == before
    with tls_server(folder) as here:
        assert answers(here, folder / "clients" / "client-0" / "ca.crt") == ""


def test_other_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert perform(app, ["deploy", "renew", str(folder), "--host", "fed.example.org"]) == 0
    assert names(folder / "server.crt") == {"fed.example.org", "localhost", "127.0.0.1"}
    assert "valid until" in capsys.readouterr()[0]
    assert perform(app, ["deploy", "renew", str(folder), "--host", "a b"]) == 2
    check_server(folder)


def test_an_authority_that_ends_is_renewed_with_its_key(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For federations of earlier versions, whose authority ends with the server's certificate."""
    for name in ("ca.crt", "ca.key", "server.crt", "server.key"):
        (folder / name).unlink()
    write_authority(folder, ["127.0.0.1"], days=20)  # the authority's ends in 200 days
    before = shutil.copyfile(folder / "ca.crt", folder.parent / "before.crt")
    key = (folder / "ca.key").read_bytes()
    assert perform(app, ["deploy", "renew", str(folder)]) == 0
    assert "each client needs it" in capsys.readouterr()[0]
    assert (folder / "ca.key").read_bytes() == key
    assert (folder / "ca.crt").read_bytes() != before.read_bytes()
    for client in ("client-0", "client-1"):
        assert (folder / "clients" / client / "ca.crt").read_bytes() == (
            folder / "ca.crt"
        ).read_bytes()
    # Both vouch for the server, until the old one ends.
    with tls_server(folder) as here:
        assert answers(here, before) == answers(here, folder / "ca.crt") == ""
    strict = ["openssl", "verify", "-x509_strict", "-CAfile", "ca.crt", "server.crt"]
    assert subprocess.run(strict, cwd=folder, capture_output=True, check=True).stdout


def test_certificates_that_have_ended_are_renewed(folder: Path) -> None:
    for name in ("ca.crt", "ca.key", "server.crt", "server.key"):
        (folder / name).unlink()
    write_authority(folder, ["127.0.0.1"], days=0)
    with pytest.raises(InputError, match="`fedshift deploy renew` on the server"):
        check_certificate(folder / "ca.crt")
    assert perform(app, ["deploy", "renew", str(folder)]) == 0
    check_server(folder)


def test_another_authority_is_not_trusted(folder: Path, tmp_path: Path) -> None:
    """Control: a client does not trust a server of another federation."""
    make_place(tmp_path / "other", "", 1, ["127.0.0.1"])
    with (
        tls_server(tmp_path / "other") as here,
        pytest.raises(InputError, match="does not vouch for"),
    ):
        answers(here, folder / "clients" / "client-0" / "ca.crt")


def test_a_clients_key(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, other = (folder / "clients" / f"client-{i}" for i in range(2))
    before = [read_client_key(place / "key.pub")[0] for place in (mine, other)]
    server = (folder / "server.crt").read_bytes()
    assert perform(app, ["deploy", "renew", str(folder), "--client", "0"]) == 0
    after = [read_client_key(place / "key.pub")[0] for place in (mine, other)]
    assert after[0] != before[0]
    assert after[1] == before[1]
    assert (mine / "key").stat().st_mode & 0o077 == 0
    assert json.loads((mine / "client.json").read_text())["partition"] == 0
    assert (folder / "server.crt").read_bytes() == server
    assert "hand out key" in capsys.readouterr()[0]
    for wrong, why in {
        ("--client", "2"): "client-2: is not there; there are client-0, client-1",
        ("--client", "0", "--host", "a"): "--host is for the server's certificate",
    }.items():
        assert perform(app, ["deploy", "renew", str(folder), *wrong]) == 2
        assert why in capsys.readouterr()[1]


EXAMPLE = Path(__file__).parents[2] / "examples" / "loopback" / "experiment.toml"


@pytest.mark.slow
def test_another_site_with_earlier_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    init = ["deploy", "init", str(EXAMPLE), str(one), "--host", "fed.example.org"]
    assert perform(app, init) == 0
    # It is only on the client's machine.
    (one / "clients" / "client-1" / "key").unlink()
    capsys.readouterr()
    more = ["-c", "shift.clients=4", "--keys", str(one)]
    assert perform(app, ["deploy", "init", str(EXAMPLE), str(two), *more]) == 0
    assert f"Clients of {one} keep their folders" in " ".join(capsys.readouterr()[0].split())
    places = clients_of(two)
    assert [place.name for place in places] == [f"client-{i}" for i in range(4)]
    for name in ("client-0", "client-1", "client-2"):
        for file in ("key.pub", "ca.crt"):
            mine = (two / "clients" / name / file).read_bytes()
            assert mine == (one / "clients" / name / file).read_bytes()
    assert not (two / "clients" / "client-1" / "key").exists()
    assert (two / "clients" / "client-0" / "key").stat().st_mode & 0o077 == 0
    assert (two / "clients" / "client-3" / "key").is_file()
    assert "fed.example.org" in names(two / "server.crt")
    # A client that has its folder of before joins the new server.
    with tls_server(two) as here:
        assert answers(here, one / "clients" / "client-0" / "ca.crt") == ""
    # Whatever is wrong with the other folder, the new one stays empty.
    (one / "ca.key").unlink()
    three = tmp_path / "three"
    assert perform(app, ["deploy", "init", str(EXAMPLE), str(three), "--keys", str(one)]) == 2
    assert not any(three.iterdir())
