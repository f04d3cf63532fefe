"""Reasons why a client cannot join a federation: certificates, keys, addresses."""

from __future__ import annotations

import datetime
import re
import socket
from pathlib import Path

import pytest

from support.tls import tls_server

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")

from fedshift.errors import InputError
from fedshift_deploy.joining import join
from fedshift_deploy.keys import check_server, write_authority, write_client_key
from fedshift_deploy.place import clients_of, make_place
from fedshift_deploy.processes import free_port
from fedshift_deploy.reaching import answers, clocks


def authority(folder: Path, *hosts: str, days: int = 30) -> Path:
    folder.mkdir()
    write_authority(folder, hosts or ["127.0.0.1"], days=days)
    return folder


def test_a_server_that_is_not_the_federations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other = authority(tmp_path / "ours"), authority(tmp_path / "other")
    elsewhere = authority(tmp_path / "elsewhere", "fed.example.org")
    late = authority(tmp_path / "late", days=0)
    monkeypatch.setattr("fedshift_deploy.keys.EARLIER", datetime.timedelta(minutes=-5))
    early = authority(tmp_path / "early")
    with tls_server(ours) as here:
        assert answers(here, ours / "ca.crt") == ""
        with pytest.raises(InputError, match=rf"^{here} shows a certificate that .*does not vouch"):
            answers(here, other / "ca.crt")
    with tls_server(elsewhere) as here, pytest.raises(InputError, match="IP address mismatch"):
        answers(here, elsewhere / "ca.crt")
    with (
        tls_server(late) as here,
        pytest.raises(
            InputError,
            match="its certificate has expired by this machine's clock, 20.* UTC: set the clock if",
        ),
    ):
        answers(here, late / "ca.crt")
    with (
        tls_server(early) as here,
        pytest.raises(InputError, match="is not valid yet by this mach"),
    ):
        answers(here, early / "ca.crt")
    with tls_server(None) as here, pytest.raises(InputError, match="speaks no TLS"):
        answers(here, ours / "ca.crt")
    unserved = f"127.0.0.1:{free_port()}"
    assert answers(unserved, ours / "ca.crt") == f"{unserved} cannot be reached: Connection refused"
    # A copy of the certificate that is under way, or was taken away.
    half = tmp_path / "half.crt"
    for expected in (f"{half}: No such file or directory; ", f"{half}: is no certificate; "):
        with pytest.raises(InputError, match=f"^{expected}bring back the federation's ca.crt$"):
            answers(unserved, half)
        half.write_text((ours / "ca.crt").read_text()[:100])
    # One that is frozen: the system takes its connections.
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        here = f"127.0.0.1:{frozen.getsockname()[1]}"
        expected = f"{here} cannot be reached: no answer within 0.2 s"
        assert answers(here, ours / "ca.crt", 0.2) == expected


def test_a_server_without_usable_keys(tmp_path: Path) -> None:
    folder, other = tmp_path / "f", authority(tmp_path / "other")
    make_place(folder, "", 1, ["localhost"])
    check_server(folder)
    files = {name: (folder / name).read_bytes() for name in ("server.crt", "server.key")}
    for change, expected in (
        ({"server.key": None}, "server.key: cannot be read: No such file"),
        ({"server.key": (other / "server.key").read_bytes()}, "server.key: not the key of"),
        ({"server.key": b"hello"}, "server.key: not the key of"),
        (
            {n: (other / n).read_bytes() for n in files},
            "server.crt: not signed by .*; take the one",
        ),
    ):
        for name, content in change.items():
            (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
        with pytest.raises(InputError, match=expected):
            clients_of(folder)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    (folder / "clients" / "client-0" / "key.pub").unlink()
    with pytest.raises(InputError, match="key.pub: is missing; the server must know this key"):
        clients_of(folder)
    with pytest.raises(InputError, match="other: no federation's folder; make it with"):
        clients_of(other)


def test_clients_that_cannot_join(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no client's folder; give one of clients/client-0"):
        join(tmp_path, "127.0.0.1:8000")
    folder = tmp_path / "f"
    make_place(folder, "", 1, ["localhost"])
    place = folder / "clients" / "client-0"
    odds = ["here", "https://here:8000", "here:8000/", "here:99999", ":8000", "a b:8000"]
    for odd in (*odds, "fed..example.org:8000", f"{'a' * 64}.org:8000"):
        with pytest.raises(InputError, match=f'server "{odd}": write it as host:port'):
            join(place, odd)
    unserved = f"127.0.0.1:{free_port()}"
    with pytest.raises(InputError, match="cannot be reached: Connection refused, for 0 s now"):
        join(place, unserved, patience=0.0)
    (place / "key").write_text("hello")
    with pytest.raises(InputError, match="key: not a private key without a password; take the o"):
        join(place, unserved)
    (place / "key").unlink()
    with pytest.raises(InputError, match="key: cannot be read: No such file"):
        join(place, unserved)
    write_client_key(place / "key.2")
    (place / "key.2").rename(place / "key")
    (place / "ca.crt").unlink()
    with pytest.raises(InputError, match=r"ca.crt: cannot be read"):
        join(place, unserved)


@pytest.mark.parametrize("host", ["fed.example.org:8000", "https://fed", "a b", "", "müll.example"])
def test_certificates_are_for_names_and_addresses(host: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f'host "{host}": give a name, as fed.example.org, or an'):
        write_authority(tmp_path, ["localhost", host])
    assert not list(tmp_path.iterdir())
    write_authority(
        tmp_path, ["localhost", "fed.example.org", "::1", "192.0.2.7", "xn--mll-hoa.de"]
    )


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (
            -60,
            r"^this machine's clock is 6[01] s ahead of that of 127.0.0.1:\d+, which takes clien",
        ),
        (
            400,
            r"^this machine's clock is (399|400) s behind that of .*: set both clocks, as by NTP",
        ),
        (0, "^$"),
        (200, "^$"),
    ],
)
def test_clocks_that_differ(ahead: float, expected: str, tmp_path: Path) -> None:
    """The limits are Flower's: up to 5 s ahead, or 305 s behind."""
    ours = authority(tmp_path / "ours")
    with tls_server(ours, ahead) as here:
        assert re.search(expected, clocks(here, ours / "ca.crt"))


def test_a_server_that_does_not_tell_the_time(tmp_path: Path) -> None:
    ours = authority(tmp_path / "ours")
    with tls_server(ours) as here:
        assert clocks(here, ours / "ca.crt") == ""
    assert clocks(f"127.0.0.1:{free_port()}", ours / "ca.crt") == ""
