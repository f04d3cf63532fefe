"""Files of a folder or an archive: none is missing without a word."""

from __future__ import annotations

import errno
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedshift.datasets.store import Folder, archive
from fedshift.errors import DataError
from fedshift_papers.datasets import retina
from support.dataset_fixtures import refuses
from support.site_fixtures import SMALL, write_tree


def test_links_to_files_and_folders_are_followed(tmp_path: Path) -> None:
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "deep" / "a.png").write_bytes(b"a")
    here.mkdir()
    (here / "folder").symlink_to(elsewhere)
    (here / "file.png").symlink_to(elsewhere / "deep" / "a.png")
    assert Folder(here).names() == ("file.png", "folder/deep/a.png")
    assert Folder(here).read("folder/deep/a.png") == b"a"


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.png").write_bytes(b"x")
    (tmp_path / "a" / "b" / "up").symlink_to(tmp_path / "a")
    (tmp_path / "self").symlink_to(".")
    assert Folder(tmp_path).names() == ("a/b/x.png",)


@pytest.mark.parametrize("target", ["/gone", "loop"])
def test_links_to_nothing_are_refused_with_what_they_link_to(tmp_path: Path, target: str) -> None:
    (tmp_path / "loop").symlink_to(target)
    (tmp_path / ".#lock").symlink_to("nobody@nowhere")
    with pytest.raises(DataError) as caught:
        Folder(tmp_path).names()
    assert str(caught.value) == (
        f"{tmp_path / 'loop'}: a link to {target}, which is not there. Bring back what it links "
        "to, or remove the link."
    )


def test_folders_that_cannot_be_opened_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The superuser may open every folder, so one that is closed is played."""
    (tmp_path / "closed").mkdir()
    really = os.scandir

    def scandir(path: str) -> Iterator[os.DirEntry[str]]:
        if path.endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return really(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with refuses(tmp_path / "closed", "cannot be opened (Permission denied)"):
        Folder(tmp_path).names()


def test_a_part_of_a_site_behind_a_link_is_counted(tmp_path: Path) -> None:
    """Half of a hospital's images would be missing else, and nothing would say so."""
    tree = write_tree(tmp_path / "retina")
    whole = retina.scan(tree)
    assert len(whole.y) == sum(sum(counts) for counts in SMALL.values())
    (tree / "REFUGE" / "Testing").rename(tmp_path / "disk")
    (tree / "REFUGE" / "Testing").symlink_to(tmp_path / "disk")
    assert retina.scan(tree).y.tolist() == whole.y.tolist()
    (tmp_path / "disk").rename(tmp_path / "unplugged")
    with pytest.raises(DataError, match="REFUGE/Testing: a link to .*disk, which is not there"):
        retina.scan(tree)


def test_images_of_a_tree_in_a_format_that_is_not_read_are_named(tmp_path: Path) -> None:
    tree = write_tree(tmp_path)
    (tree / "REFUGE" / "Training" / "Normal" / "scan.TIF").write_bytes(b"II*\0")
    (tree / "notes.tif").write_bytes(b"II*\0")
    name = "REFUGE/Training/Normal/scan.TIF"
    with refuses(tree, f"holds {name}, which is no JPEG or PNG file (1 of them); convert them"):
        retina.scan(tree)


def tar_of(path: Path, *members: tuple[str, bytes, str]) -> Path:
    """An archive of (name, kind, content, or where it links to)."""
    with tarfile.open(path, "w") as tar:
        for name, kind, body in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            content = body.encode() if kind == tarfile.REGTYPE else b""
            info.size, info.linkname = len(content), "" if content else body
            tar.addfile(info, io.BytesIO(content))
    return path


PLAIN, SOFT, HARD = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


def test_links_of_an_archive_stand_for_its_files(tmp_path: Path) -> None:
    path = tar_of(
        tmp_path / "a.tar",
        ("./p/a.png", PLAIN, "a"),
        ("q/soft.png", SOFT, "../p/a.png"),
        ("q/hard.png", HARD, "./p/a.png"),
        ("q/again.png", SOFT, "soft.png"),
    )
    contents = archive(path)
    assert contents.names() == ("./p/a.png", "q/again.png", "q/hard.png", "q/soft.png")
    assert {contents.read(name) for name in contents.names()} == {b"a"}


@pytest.mark.parametrize("target", ["/etc/hostname", "../../outside", "p"])
def test_links_out_of_an_archive_or_to_folders_are_refused(tmp_path: Path, target: str) -> None:
    path = tar_of(
        tmp_path / "a.tar",
        ("p/a.png", PLAIN, "a"),
        (".hidden", SOFT, "/etc/hostname"),
        ("link", SOFT, target),
    )
    with refuses(path, f"link is a link to {target}, which is no file of the archive; pack what"):
        archive(path)


def test_what_was_added_later_replaces_what_was_there(tmp_path: Path) -> None:
    members = [("a", PLAIN, "old"), ("b", PLAIN, "b"), ("a", SOFT, "b"), ("a", PLAIN, "new")]
    assert archive(tar_of(tmp_path / "a.tar", *members)).read("a") == b"new"
    assert archive(tar_of(tmp_path / "b.tar", *members[:3])).read("a") == b"b"
