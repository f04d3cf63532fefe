"""A federation's folder, keys and processes; and a whole federation on loopback, slowly."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedshift.cli.app import main
from fedshift.cli.console import PlainProgress
from fedshift.errors import DataError, FedshiftError, InputError, TrainingError
from fedshift_deploy.federation import Link, follow
from fedshift_deploy.joining import join
from fedshift_deploy.keys import check_certificate, write_authority, write_client_key
from fedshift_deploy.place import clients_of, make_place
from fedshift_deploy.processes import check_port, free_port, run_flower, running, wait_for
from fedshift_deploy.supernode import JOINED
from support.own_sites import FILE
from support.tls import tls_server

ROOT = Path(__file__).parents[2]


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
    with pytest.raises(InputError, match="No such file or directory; take the one that `f"):
        check_certificate(tmp_path / "ca.crt")
    (tmp_path / "odd.crt").write_text("hello")
    with pytest.raises(InputError, match="odd.crt: not a certificate; take the one"):
        check_certificate(tmp_path / "odd.crt")
    write_authority(tmp_path, ["localhost"], days=0)
    with pytest.raises(
        InputError, match=r"server.crt: valid from .* and this machine's clock says 20.*: set"
    ):
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
    with pytest.raises(InputError, match="nowhere.invalid:8000 cannot be opened: .*give --host"):
        check_port("nowhere.invalid", 8000)
    check_port("127.0.0.1", free_port())


@pytest.mark.few(1)
@pytest.mark.parametrize("new_session", [False, True])
def test_processes_end_with_their_children(new_session: bool, tmp_path: Path) -> None:
    """Also children in a session of their own."""
    code = (
        "import subprocess, sys, time\n"
        "child = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        f"child = subprocess.Popen(child, start_new_session={new_session})\n"
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


def test_a_process_whose_parent_is_killed_ends(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux tells a process that its parent has died")
    child = "import time; time.sleep(60)"
    code = (
        "import os, sys, time, pathlib\n"
        "from fedshift_deploy.processes import running\n"
        f"with running([sys.executable, '-c', {child!r}], os.environ, pathlib.Path('log')) as p:\n"
        "    print(p.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=tmp_path)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 10
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


# What Flower's SuperNode logs of a refusal.
NO = "Failed to initialize the connection to the SuperLink.\n[code: 2004] no"


def ending(*ends: tuple[int, str]) -> Any:
    """Replace SuperNodes by processes that write a text to their log and end with a code."""
    left = iter(ends)

    @contextlib.contextmanager
    def process(command: list[str], env: dict[str, str], log: Path) -> Iterator[Any]:
        code, text = next(left)
        with log.open("a") as f:
            f.write(f"{text}\n")
        yield SimpleNamespace(wait=lambda: code, poll=lambda: code)

    return process


def into(lines: list[str]) -> Callable[[str, str], None]:
    return lambda text, level: lines.append(text)


def test_a_client_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "f"
    make_place(folder, "", 1, ["127.0.0.1"])
    place = folder / "clients" / "client-0"
    monkeypatch.setattr("fedshift_deploy.supernode.running", ending(*[(1, NO)] * 2))
    message = r"does not let this client in \(\[code: 2004\] no\): it does"
    with tls_server(folder) as here, pytest.raises(InputError, match=message) as error:
        join(place, here, patience=0.0)
    assert error.value.exit_code == 2
    # What a wrong clock does is not said to be the key's fault.
    with tls_server(folder, ahead=-60) as here, pytest.raises(InputError, match="clock is 6. s ah"):
        join(place, here, patience=0.0)


def test_a_client_whose_super_node_is_killed_joins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At growing intervals, reported once; a refusal right after comes from the server's memory."""
    folder, lines, pauses = tmp_path / "f", list[str](), list[float]()
    make_place(folder, "", 1, ["127.0.0.1"])
    place, now = folder / "clients" / "client-0", [1000.0]
    nodes = ending((-9, JOINED), (1, NO), *[(-9, JOINED)] * 6, (1, NO))
    monkeypatch.setattr("fedshift_deploy.supernode.running", nodes)
    monkeypatch.setattr("fedshift_deploy.joining.time", SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda s: (pauses.append(s), now.append(now.pop() + s))
    ))  # fmt: skip
    monkeypatch.setattr("fedshift_deploy.joining.FORGETS", 30.0)
    with tls_server(folder) as here, pytest.raises(InputError, match="does not let this client in"):
        join(place, here, patience=60.0, say=into(lines))
    assert lines == [
        f"joined {here}",
        "the SuperNode was ended by signal 9, perhaps for lack of memory; joining again, which may "
        f"take a minute (see {place / 'supernode.log'})",
        f"joined {here}",
    ]
    assert pauses == [4.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_a_client_stays_for_the_next_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a server is no refusal: patience starts again."""
    folder, lines = tmp_path / "f", list[str]()
    make_place(folder, "", 1, ["127.0.0.1"])
    nodes = ending((0, JOINED), (1, f"{JOINED}\noh"), (1, NO))
    monkeypatch.setattr("fedshift_deploy.supernode.running", nodes)
    for name in ("PAUSE", "LONGEST", "FORGETS"):
        monkeypatch.setattr(f"fedshift_deploy.joining.{name}", 0.0)
    with tls_server(folder) as here, pytest.raises(InputError, match="does not let this client in"):
        join(folder / "clients" / "client-0", here, patience=0.0, say=into(lines))
    assert lines == [
        f"joined {here}",
        "the server has ended; waiting for the next one",
        f"joined {here}",
        "the SuperNode failed (oh); joining again, which may take a minute "
        f"(see {folder / 'clients' / 'client-0' / 'supernode.log'})",
    ]


def test_flowers_refusals_are_one_line() -> None:
    answer = '{"success": false, "error-message": "\\nno such\\napp\\n"}'
    with pytest.raises(InputError, match="^`flwr ls -x` failed: no such app$"):
        run_flower(["ls", "-x"], os.environ, [sys.executable, "-c", f"print({answer!r})"])
    with pytest.raises(FedshiftError, match="failed: 7"):
        run_flower(["ls", "-x"], os.environ, [sys.executable, "-c", "print(7)"])


def call(*args: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["fedshift", "deploy", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any mistake found before a process starts ends with exit code 2 and one message."""
    folder, late = tmp_path / "f", tmp_path / "late"
    make_place(folder, "shift.clients = 1", 1, ["127.0.0.1"])
    make_place(late, "", 1, ["127.0.0.1"])
    for name in ("ca.crt", "ca.key", "server.crt", "server.key"):
        (late / name).unlink()
    write_authority(late, ["127.0.0.1"], days=0)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = str(s.getsockname()[1])
        cases = {
            f"127.0.0.1:{port} cannot be opened: Address already in use; give --port": [
                "server", str(folder), "--port", port],
            f"{late}/ca.crt: valid from": ["server", str(late)],
            f"{tmp_path}/none/ca.crt: cannot be read": ["server", str(tmp_path / "none")],
            f"{tmp_path}/none: neither a federation's folder": ["check", str(tmp_path / "none")],
            f"{tmp_path}/none: no client's folder": [
                "client", str(tmp_path / "none"), "--server", "127.0.0.1:8000"],
        }  # fmt: skip
        for message, args in cases.items():
            assert call(*args, monkeypatch=monkeypatch) == 2
            printed, errors = capsys.readouterr()
            assert not printed
            assert errors.startswith(f"error: {message}")
            assert len(errors.splitlines()) == 1


def test_the_server_may_always_call_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever names others call it by; and a later run gets a folder of its own."""
    from fedshift_deploy.command import init, next_folder

    init(
        ROOT / "examples" / "loopback" / "experiment.toml", tmp_path / "f", ["fed.example.org"], []
    )
    names = certificate(tmp_path / "f" / "server.crt").extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert names.value.get_values_for_type(x509.DNSName) == ["fed.example.org", "localhost"]
    assert [str(a) for a in names.value.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert next_folder(tmp_path) == tmp_path / "run"
    (tmp_path / "run").mkdir()
    assert next_folder(tmp_path) == tmp_path / "run-2"


def test_clients_with_data_of_their_own_do_not_join_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before anything starts; control: without the option the port is tried."""
    folder = tmp_path / "f"
    make_place(folder, FILE, 3, ["localhost"])
    server = ("server", str(folder), "--host", "192.0.2.7")
    assert call(*server, "--min-clients", "2", monkeypatch=monkeypatch) == 2
    assert "none can join late: leave out --min-clients" in capsys.readouterr().err
    assert call(*server, monkeypatch=monkeypatch) == 2
    assert "192.0.2.7:8000 cannot be opened" in capsys.readouterr().err


def test_what_a_run_raised(tmp_path: Path) -> None:
    """An error's class, and so its exit code, comes from its event in the other process."""
    link = Link(tmp_path, {}, tmp_path / "log")
    for kind in (InputError, DataError, TrainingError):
        event = {"event": "failed", "error": "so", "exit_code": kind.exit_code}
        lost = '{"event": "round", "rou\n'  # as a full disk leaves it
        (tmp_path / "events.jsonl").write_text(lost + json.dumps(event) + "\n")
        with pytest.raises(FedshiftError, match="^so$") as error:
            follow("1", tmp_path, link, PlainProgress())
        assert type(error.value) is kind


def ran(*args: str, cwd: Path) -> Any:
    return subprocess.run(args, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_federation_on_loopback(tmp_path: Path) -> None:
    """One server, three clients, TLS and keys: the run folder of one process, bit for bit."""
    fedshift = str(Path(sys.executable).with_name("fedshift"))
    example = ROOT / "examples" / "loopback"
    # An evaluation asks every client in a process of its own: one is enough.
    once = ("-c", "training.evaluate_every=3")
    there = ran(sys.executable, str(example / "run.py"), *once, "--out", "there", cwd=tmp_path)
    assert there.returncode == 0, there.stderr
    # With the cap that `deploy init` writes; without it client 1 has two thirds of the weight.
    capped = [str(example / "experiment.toml"), *once, "-c", "training.max_weight=0.5"]
    here = ran(fedshift, "run", *capped, "--out", "here", cwd=tmp_path)
    table = here.stdout.split("gap to T:")[0]
    assert table.strip() in there.stdout
    for name in ("summary.json", "model.safetensors", "metrics.csv", "clients.csv", "lock.json"):
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()
