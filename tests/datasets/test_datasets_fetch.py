"""Downloads, from a server on this machine: right, wrong, cut short, absent, interrupted."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import http.server
import io
import os
import re
import socket
import tarfile
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedshift.datasets import catalogue, fetch
from fedshift.datasets.catalogue import Remote
from fedshift.errors import DataError, InputError, NetworkError

CONTENT = {"/a.gz": b"a" * 300_000, "/b.gz": b"b" * 700}


class Server(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT; /cut/ breaks off half-way, /long/ sends more, /other/ sends other bytes."""

    def do_GET(self) -> None:
        fault, _, name = self.path[1:].rpartition("/")
        body = getattr(self.server, "extra", {}).get(self.path) or CONTENT.get("/" + name)
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        if body is None or fault == "gone":
            self.send_error(404)
            return
        sent = {"cut": body[: len(body) // 2], "long": body + b"!"}
        self.send_response(200)
        if fault != "long":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(b"x" * len(body) if fault == "other" else sent.get(fault, body))

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        running.asked = []  # type: ignore[attr-defined]
        running.extra = {}  # type: ignore[attr-defined]
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def serve(server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Moves "mnist" to the local server: `serve(fault)` for both of its files."""

    def move(fault: str = "", port: int | None = None) -> None:
        base = f"http://127.0.0.1:{port or server.server_port}/{fault + '/' if fault else ''}"
        remotes = tuple(
            Remote(base + path[1:], hashlib.md5(body).hexdigest(), len(body))
            for path, body in CONTENT.items()
        )
        relocate(monkeypatch, "mnist", remotes)

    return move


def relocate(monkeypatch: pytest.MonkeyPatch, name: str, remotes: tuple[Remote, ...]) -> None:
    one = dataclasses.replace(catalogue.entry(name), remotes=remotes)
    # The package exports the function under the module's name, hence not by dotted path.
    monkeypatch.setitem(fetch.__globals__, "entry", lambda wanted: one)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def fails(tmp_path: Path, reason: str, **options: Any) -> str:
    with pytest.raises(NetworkError, match=re.escape(reason)) as caught:
        fetch("mnist", tmp_path, **options)
    message = str(caught.value)
    assert caught.value.exit_code == 5
    for part in ("could not be downloaded", "a.gz, b.gz", str(tmp_path / "mnist"), "without a net"):
        assert part in message
    assert not [name for name in files(tmp_path) if "part" in name]
    return message


def test_a_download_arrives_with_progress(serve: Any, tmp_path: Path) -> None:
    serve()
    steps: list[tuple[int, int]] = []
    folder = fetch("mnist", tmp_path, progress=lambda done, total: steps.append((done, total)))
    assert folder == tmp_path / "mnist"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path[1:]: body for path, body in CONTENT.items()
    }
    assert {total for _, total in steps} == {300_700}
    done = [done for done, _ in steps]
    assert done == sorted(done)
    assert done[-1] == 300_700
    assert len(set(done)) >= 3


def test_what_is_present_and_right_is_not_asked_for(
    serve: Any, server: Any, tmp_path: Path
) -> None:
    serve()
    fetch("mnist", tmp_path)
    server.asked.clear()
    steps: list[int] = []
    fetch("mnist", tmp_path, progress=lambda done, total: steps.append(done))
    assert server.asked == []
    assert steps == [300_000, 300_700]
    (tmp_path / "mnist" / "b.gz").write_bytes(b"damaged")
    fetch("mnist", tmp_path)
    assert server.asked == ["/b.gz"]
    assert (tmp_path / "mnist" / "b.gz").read_bytes() == CONTENT["/b.gz"]


def test_the_cache_folder_is_the_default(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetch("mnist") == tmp_path / "fedshift" / "mnist"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("other", "its md5 is"),
        ("cut", "only 150,000 of 300,000 bytes arrived"),
        ("long", "more than the expected 300,000 bytes arrived"),
        ("gone", "Not Found"),
    ],
)
def test_wrong_answers_leave_nothing(
    serve: Any, server: Any, tmp_path: Path, fault: str, reason: str
) -> None:
    serve(fault)
    message = fails(tmp_path, reason)
    assert f"http://127.0.0.1:{server.server_port}/{fault}/a.gz" in message
    assert files(tmp_path) == []


def test_a_failure_keeps_the_file_that_was_there(serve: Any, tmp_path: Path) -> None:
    serve("cut")
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "a.gz").write_bytes(b"an older copy")
    fails(tmp_path, "only 150,000")
    assert (tmp_path / "mnist" / "a.gz").read_bytes() == b"an older copy"


def test_refused_connection(serve: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    serve(port=port)
    fails(tmp_path, "Connection refused")


def test_no_network_names_the_official_address_and_the_debian_package(tmp_path: Path) -> None:
    def offline(url: str) -> Any:
        raise urllib.error.URLError("Temporary failure in name resolution")

    with pytest.raises(NetworkError) as caught:
        fetch("fashion-mnist", tmp_path, opener=offline)
    message = str(caught.value)
    base = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
    assert message.startswith(
        f"{base}train-images-idx3-ubyte.gz could not be downloaded: Temporary failure in name"
    )
    assert "apt-get install dataset-fashion-mnist" in message
    assert "train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz" in message
    with pytest.raises(
        NetworkError, match=r"unpack it and put data_batch_1, .* in .*batches-py\.$"
    ):
        fetch("cifar-10", tmp_path, opener=offline)


def test_an_interruption_leaves_nothing(serve: Any, tmp_path: Path) -> None:
    serve()

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("mnist", tmp_path, progress=stop)
    assert files(tmp_path) == []


def test_sets_that_need_no_download_and_unknown_ones() -> None:
    with pytest.raises(InputError, match=r'"gaussians" needs no download \(generated\)'):
        fetch("gaussians")
    with pytest.raises(InputError, match=r'"fashion-mnist-mini" needs no download \(part of the p'):
        fetch("fashion-mnist-mini")
    with pytest.raises(InputError, match=r'unknown data set "cifar10".*Did you mean "cifar-10"'):
        fetch("cifar10")


def test_a_folder_that_cannot_be_written(serve: Any, tmp_path: Path) -> None:
    serve()
    (tmp_path / "file").touch()
    with pytest.raises(
        InputError,
        match=r"file/mnist: cannot be written \(Not a directory\)\. No folder can be made",
    ):
        fetch("mnist", tmp_path / "file")


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "Free some space there or name another folder"),
        (errno.EROFS, "It is closed to you; name a folder that you may write to"),
        (errno.ENOENT, "No folder can be made there; name another"),
    ],
)
def test_the_advice_fits_the_reason(
    number: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(InputError, match=advice):
        fetch("mnist", tmp_path)


def test_a_failure_leaves_no_new_folder(serve: Any, tmp_path: Path) -> None:
    serve("gone")
    (tmp_path / "mine").mkdir()
    with pytest.raises(NetworkError):
        fetch("mnist", tmp_path / "mine" / "a" / "b")
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


# -------------------------------------------------------------------------------------- archives

MEMBERS = {"data_batch_1": b"one" * 99, "test_batch": b"two" * 99}


def archive(members: dict[str, bytes], folder: str = "cifar-10-batches-py") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, body in {**members, "../../escaped": b"!", "readme.html": b"?"}.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size, info.mode = len(body), 0o777
            tar.addfile(info, io.BytesIO(body))
    return stream.getvalue()


def serve_archive(
    server: Any, monkeypatch: pytest.MonkeyPatch, body: bytes, wanted: dict[str, bytes]
) -> None:
    server.extra["/c.tar.gz"] = body
    digests = tuple((name, hashlib.md5(content).hexdigest()) for name, content in wanted.items())
    url = f"http://127.0.0.1:{server.server_port}/c.tar.gz"
    remote = Remote(url, hashlib.md5(body).hexdigest(), len(body), digests)
    relocate(monkeypatch, "cifar-10", (remote,))


def test_only_the_wanted_files_leave_an_archive(
    server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve_archive(server, monkeypatch, archive(MEMBERS), MEMBERS)
    folder = fetch("cifar-10", tmp_path / "in")
    assert folder == tmp_path / "in" / "cifar-10-batches-py"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == MEMBERS
    assert files(tmp_path) == sorted(MEMBERS)
    server.asked.clear()
    fetch("cifar-10", tmp_path / "in")
    assert server.asked == []


def test_a_wrong_archive_is_refused(
    server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cases = {
        "has the md5": archive({**MEMBERS, "test_batch": b"forged"}),
        "not found": archive({"data_batch_1": MEMBERS["data_batch_1"]}),
        "not the official archive": b"not a tar file at all",
        "c.tar.gz: not the official": archive(MEMBERS)[:-40],
    }
    for message, body in cases.items():
        serve_archive(server, monkeypatch, body, MEMBERS)
        with pytest.raises(DataError, match=message):
            fetch("cifar-10", tmp_path)
        assert [name for name in files(tmp_path) if name not in MEMBERS] == []


def test_a_link_in_the_place_of_a_member_is_refused(
    server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        info = tarfile.TarInfo("cifar-10-batches-py/test_batch")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(info)
    serve_archive(server, monkeypatch, stream.getvalue(), {"test_batch": b""})
    with pytest.raises(DataError, match="not the official archive"):
        fetch("cifar-10", tmp_path)
    assert files(tmp_path) == []
