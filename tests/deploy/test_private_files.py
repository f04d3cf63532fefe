"""What other users of a machine may read and write in a federation's folder."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift.errors import InputError
from fedshift.files import check_unshared, private
from fedshift_deploy.federation import environment, superlink
from fedshift_deploy.inside import SOCKET, listening, private_socket
from fedshift_deploy.joining import check_place, node_command
from fedshift_deploy.place import check_place_unshared, make_place, renew_certificate, renew_client
from fedshift_deploy.processes import free_port, running
from support.another_user import NOBODY, elsewhere, needs_root


@pytest.fixture(autouse=True)
def generous() -> Iterator[None]:
    """A umask of 0: files are open to everyone unless a program restricts them."""
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
    """A user that may write to the parent folder can replace the federation, with its code."""
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


USERS = 100  # a group that accounts share, on Debian as elsewhere


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder that other users can enter, as they cannot pytest's."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o711)
        yield Path(name)


def exchange_app(folder: Path) -> bool:
    """Replace a federation's app by one that names other code."""
    (folder / "app").rename(folder / "before")
    (folder / "app").mkdir()
    text = '[tool.flwr.app.components]\nserverapp = "evil:app"\n'
    (folder / "app" / "pyproject.toml").write_text(text)
    return True


@needs_root
@pytest.mark.parametrize("mode", [0o775, 0o2775, 0o1775])
def test_a_folder_in_which_a_group_may_write_is_refused(mode: int, outside: Path) -> None:
    """The control: as a member of that group another user puts an app of its own there."""
    folder = outside / "f"
    folder.mkdir()
    os.chown(folder, 0, USERS)
    folder.chmod(0o755)
    make_place(folder, "", 1, ["127.0.0.1"])
    folder.chmod(mode)
    message = f"f: users of the group {grp.getgrgid(USERS).gr_name} may write there; run `chmod g-w"
    with (
        pytest.raises(InputError, match=message),
        superlink(folder, host="127.0.0.1", port=free_port()),
    ):
        pass
    os.chown(folder / "clients" / "client-0", 0, USERS)
    (folder / "clients" / "client-0").chmod(mode)
    with pytest.raises(InputError, match="client-0: users of the group"):
        node_command(folder / "clients" / "client-0", "127.0.0.1:9")
    if mode & stat.S_ISVTX:  # others' folders stay; a file of this name could still be made first
        with pytest.raises(AssertionError, match="PermissionError"):
            elsewhere(lambda: exchange_app(folder), group=USERS)
    else:
        assert elsewhere(lambda: exchange_app(folder), group=USERS)
    empty = outside / "g"
    empty.mkdir()
    os.chown(empty, 0, USERS)
    empty.chmod(mode)
    with pytest.raises(InputError, match="g: users of the group"):
        make_place(empty, "", 1, ["127.0.0.1"])
    assert not [*empty.iterdir()]


@needs_root
def test_a_folder_above_in_which_a_group_may_write_is_refused(outside: Path) -> None:
    """Not where it is sticky, nor where its group is its owner's alone."""
    os.chown(outside, 0, USERS)
    for mode, group, refused in (
        (0o775, USERS, True), (0o1775, USERS, False), (0o755, USERS, False), (0o775, 0, False),
    ):  # fmt: skip
        os.chown(outside, 0, group)
        outside.chmod(mode)
        with pytest.raises(InputError, match="g: users of") if refused else nullcontext():
            make_place(outside / "g", "", 1, ["127.0.0.1"])
        if not refused:
            shutil.rmtree(outside / "g")
    outside.chmod(0o1777)
    (outside / "f").mkdir(mode=0o755)
    (outside / "link").symlink_to("f")
    check_unshared(outside / "link")
    os.chown(outside / "link", NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(InputError, match=r"link: another user \(65534\) may put another folder"):
        check_unshared(outside / "link")
    os.chown(outside, NOBODY, 0)
    outside.chmod(0o755)
    with pytest.raises(InputError, match=r"another user \(65534\) may put another folder in its"):
        make_place(outside / "g", "", 1, ["127.0.0.1"])


@needs_root
def test_a_group_of_the_owner_alone_is_no_other_user(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many systems give each account its group, with a umask of 002. Control: one more member."""
    folder = outside / "f"
    folder.mkdir()
    folder.chmod(0o775)
    entry, root = grp.getgrgid(0), pwd.getpwuid(0)
    other = pwd.struct_passwd(("other", "x", 4321, 0, "", "/", "/bin/sh"))
    with monkeypatch.context() as m:
        m.setattr(grp, "getgrgid", lambda _: grp.struct_group((*entry[:3], [])))
        m.setattr(pwd, "getpwall", lambda: [root])
        check_unshared(folder)
        m.setattr(pwd, "getpwall", lambda: [root, other])
        with pytest.raises(InputError, match="users of the group root"):
            check_unshared(folder)
        m.setattr(pwd, "getpwall", lambda: [root])
        m.setattr(grp, "getgrgid", lambda _: grp.struct_group((*entry[:3], ["other"])))
        with pytest.raises(InputError, match="users of the group root"):
            check_unshared(folder)


@needs_root
def test_a_list_that_lets_another_user_write_is_no_private_group(outside: Path) -> None:
    """By its mode it looks like the owner's own group; the control: that user writes there."""
    folder, name = outside / "f", "system.posix_acl_access"
    folder.mkdir()
    folder.chmod(0o775)
    check_unshared(folder)
    mine, other, group, most, rest = 1, 2, 4, 16, 32  # tags of acl(5)
    entries = ((mine, 7, -1), (other, 7, NOBODY), (group, 5, -1), (most, 7, -1), (rest, 5, -1))
    rules = b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(folder, name, struct.pack("<I", 2) + rules)
    except OSError:
        pytest.skip("this file system has no access control lists")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o775
    with pytest.raises(InputError, match="users of the group root may write there"):
        check_unshared(folder)

    def write() -> bool:
        (folder / "evil.py").touch()
        return True

    assert elsewhere(write)


@needs_root
def test_keys_and_renewal_of_a_shared_folder_are_refused(outside: Path) -> None:
    """Another user may have placed an authority there; the control: once it is not shared."""
    folder = outside / "f"
    make_place(folder, "", 1, ["127.0.0.1"])
    os.chown(folder, 0, USERS)
    work = (
        lambda: make_place(outside / "g", "", 1, [], keys=folder),
        lambda: renew_certificate(folder),
        lambda: renew_client(folder, 0),
    )
    for mode, refused in ((0o775, True), (0o755, False)):
        folder.chmod(mode)
        for do in work:
            with pytest.raises(InputError, match="f: users of") if refused else nullcontext():
                do()


@needs_root
def test_what_lies_in_a_federations_folder_is_its_owners(tmp_path: Path) -> None:
    """Each is code, a key or a setting; a link may lead to a file that others can change."""
    folder = tmp_path / "f"
    make_place(folder, "", 1, ["127.0.0.1"])
    client = folder / "clients" / "client-0"
    check_place_unshared(folder)
    check_place(client)
    for path in (
        folder / "app", folder / "app" / "pyproject.toml", folder / "clients", client,
        client / "key.pub", folder / "experiment.toml", folder / "server.crt",
    ):  # fmt: skip
        mode = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode | stat.S_IWOTH)
        with pytest.raises(InputError, match=f"{path.name}: every user may write there"):
            check_place_unshared(folder)
        path.chmod(mode)
        os.chown(path, NOBODY, 0)
        with pytest.raises(InputError, match=f"{path.name}: belongs to another user"):
            check_place_unshared(folder)
        os.chown(path, 0, 0)
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(InputError, match=f"{path.name}: a link"):
            check_place_unshared(folder)
        path.unlink()
        (tmp_path / "elsewhere").rename(path)
        check_place_unshared(folder)
    (client / "site.py").touch()  # every user may write: see `generous`
    with pytest.raises(InputError, match="site.py: every user may write there"):
        check_place(client)


@needs_root
def test_a_folder_of_another_user_is_refused(outside: Path) -> None:
    """Its owner could replace the app that the server's user runs."""
    folder = outside / "f"
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
    # The control: it can, though it may not read what is in there.
    assert elsewhere(lambda: exchange_app(folder))


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
