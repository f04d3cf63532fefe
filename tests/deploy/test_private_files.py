"""What other users of a machine may read and write of a federation."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift.deploy.federation import environment, superlink
from fedshift.deploy.inside import SOCKET, listening, private_socket
from fedshift.deploy.joining import node_command
from fedshift.deploy.place import make_place
from fedshift.deploy.processes import free_port, running
from fedshift.errors import InputError
from fedshift.files import private
from support.another_user import NOBODY, elsewhere, needs_root


@pytest.fixture(autouse=True)
def generous() -> Iterator[None]:
    """Everything may be read and written by everyone, unless somebody asks for less."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}


def test_a_new_federation_is_its_owners_alone(tmp_path: Path) -> None:
    make_place(tmp_path / "a" / "f", "", 2, ["127.0.0.1"])
    environment(tmp_path / "a" / "f" / "flower")
    assert modes(tmp_path / "a") == {0o600, 0o700}
    # The control: what is made without it.
    (tmp_path / "b").mkdir()
    assert modes(tmp_path / "b") == {0o777}


def test_a_folder_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir(mode=0o750)
    make_place(tmp_path / "f", "", 1, ["127.0.0.1"])
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o750
    assert modes(tmp_path / "f" / "app") == {0o600, 0o700}


def test_processes_write_for_their_owner_alone(tmp_path: Path) -> None:
    line = [sys.executable, "-c", "open('made', 'w')"]
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        with running(line, os.environ, tmp_path / "log") as process:
            process.wait(60)
    finally:
        os.chdir(before)
    assert modes(tmp_path / "log") == modes(tmp_path / "made") == {0o600}
    with private():
        pass
    assert os.umask(0) == 0


def test_a_folder_in_which_everyone_may_write_is_refused(tmp_path: Path) -> None:
    make_place(tmp_path / "f", "", 1, ["127.0.0.1"])
    place = tmp_path / "f" / "clients" / "client-0"
    assert node_command(place, "127.0.0.1:9")
    for folder in (tmp_path / "f", place):
        folder.chmod(0o777)
    with (
        pytest.raises(InputError, match=r"f: every user may write there; run `chmod o-w .*f` fi"),
        superlink(tmp_path / "f", host="127.0.0.1", port=free_port()),
    ):
        pass
    with pytest.raises(InputError, match="client-0: every user may write there"):
        node_command(place, "127.0.0.1:9")


def test_a_folder_that_others_can_exchange_is_refused(tmp_path: Path) -> None:
    """Who may write to the folder above can put another federation, with code, in its place."""
    above = tmp_path / "open"
    above.mkdir()
    make_place(tmp_path / "f", "", 1, ["127.0.0.1"])
    place = tmp_path / "f" / "clients" / "client-0"
    place.rename(above / "client-0")
    for mode, refused in ((0o777, True), (0o1777, False)):
        above.chmod(mode)
        with pytest.raises(InputError, match="put another") if refused else nullcontext():
            node_command(above / "client-0", "127.0.0.1:9")
        with pytest.raises(InputError, match="put another") if refused else nullcontext():
            make_place(above / "g", "", 1, ["127.0.0.1"])
        assert (above / "g" / "ca.key").exists() == (not refused)


@needs_root
def test_a_folder_of_another_user_is_refused() -> None:
    """Its owner can exchange the app, which the server's user runs."""
    with tempfile.TemporaryDirectory() as name:
        # Not pytest's folder, which other users cannot enter.
        os.chmod(name, 0o711)
        folder = Path(name) / "f"
        folder.mkdir(mode=0o755)
        os.chown(folder, NOBODY, NOBODY)
        with pytest.raises(InputError, match=r"f: belongs to another user \(65534\), who may cha"):
            make_place(folder, "", 1, ["127.0.0.1"])
        os.chown(folder, 0, 0)
        make_place(folder, "", 1, ["127.0.0.1"])
        os.chown(folder, NOBODY, NOBODY)
        with (
            pytest.raises(InputError, match="belongs to another user"),
            superlink(folder, host="127.0.0.1", port=free_port()),
        ):
            pass

        def exchange() -> bool:
            (folder / "app").rename(folder / "before")
            (folder / "app").mkdir()
            return True

        # The control: it can, though it may not read what is in there.
        assert elsewhere(exchange)


def test_a_socket_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with private_socket() as variable:
        path = Path(variable[SOCKET])
        listening(str(path)).close()
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.parent.exists()
    deep = tmp_path / ("a" * 90)
    deep.mkdir()
    for place, why in (
        (deep, "too long for a socket's path; set TMPDIR to a sh"),
        (path, "no temp"),
    ):
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        with pytest.raises(InputError, match=why), private_socket():
            pass
    assert list(deep.iterdir()) == []
