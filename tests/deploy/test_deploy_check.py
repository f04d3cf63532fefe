"""`fedshift deploy check` refuses what `deploy server` and `deploy client` would refuse."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift.errors import InputError
from fedshift_deploy.place import clients_of, make_place
from fedshift_deploy.processes import free_port
from support.another_user import needs_root
from support.command_line import code_of
from support.own_sites import FILE

Checked = Callable[[Path], tuple[int, str, str]]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Checked:
    def checked(folder: Path) -> tuple[int, str, str]:
        code = code_of(monkeypatch, "deploy", "check", str(folder), "--port", str(free_port()))
        printed = capsys.readouterr()
        return code, *(" ".join(text.split()) for text in printed)  # type: ignore[return-value]

    return checked


@pytest.fixture
def fed(tmp_path: Path) -> Path:
    make_place(tmp_path / "f", FILE, 3, ["127.0.0.1"])
    return tmp_path / "f"


def test_a_folder_that_can_start(fed: Path, check: Checked) -> None:
    """The control of all tests below; the cap is reported."""
    code, out, _ = check(fed)
    assert code == 0
    assert "No cap, since the experiment names none" in out
    assert "the experiment can start; nothing was trained" in out
    file = fed / "experiment.toml"
    file.write_text(file.read_text().replace("[training]", "[training]\nmax_weight = 0.1"))
    assert "above 1/3: 0.1 is less than 1/3, the least for 3 clients" in check(fed)[1]
    file.unlink()
    assert check(fed)[0] == 2
    assert check(fed / "clients" / "client-1")[:2] == (
        0, "client-1: the experiment gives the clients their data",
    )  # fmt: skip


def broken_text(fed: Path) -> None:
    (fed / "experiment.toml").write_text("[data\n")


def another_method(fed: Path) -> None:
    text = FILE.replace('"fedpals"\ness = 0.5', '"feddrm"')
    assert text != FILE
    (fed / "experiment.toml").write_text(text)


def no_model(fed: Path) -> None:
    text = FILE.replace('[model]\nname = "mlp"\nhidden = [8]\n', "")
    assert text != FILE
    (fed / "experiment.toml").write_text(text)


def one_key(fed: Path) -> None:
    shutil.copy(fed / "clients" / "client-0" / "key.pub", fed / "clients" / "client-2")


def open_to_all(fed: Path) -> None:
    fed.chmod(0o777)


def linked_app(fed: Path) -> None:
    (fed / "app").rename(fed.parent / "app")
    (fed / "app").symlink_to(fed.parent / "app")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (broken_text, "experiment.toml: not valid TOML"),
        (another_method, 'experiment.toml:11: model.name "mlp" has no b'),
        (
            no_model,
            'the data are rows of numbers; use "mlp" or "linear" as name of [model]',
        ),
        (one_key, "client-2/key.pub: the same key as"),
        (open_to_all, "f: every user may write there"),
        (linked_app, "app: a link"),
    ],
)
def test_what_a_server_would_refuse(
    spoil: Callable[[Path], None], words: str, fed: Path, check: Checked
) -> None:
    spoil(fed)
    code, out, err = check(fed)
    assert (code, out) == (2, "")
    assert words in err


@needs_root
def test_a_folder_of_a_group_is_no_fine_folder(fed: Path, check: Checked) -> None:
    os.chown(fed, 0, 100)
    fed.chmod(0o2775)
    assert "may write there; run `chmod g-w" in check(fed)[2]
    fed.chmod(0o2755)
    assert check(fed)[0] == 0


def test_a_new_key_mends_two_clients_of_one(
    fed: Path, check: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the command that the refusal names."""
    one_key(fed)
    cure = check(fed)[2].partition("`")[2].partition("`")[0]
    assert cure == f"fedshift deploy renew {fed} --client 2"
    with pytest.raises(InputError, match="the same key"):
        clients_of(fed)
    assert code_of(monkeypatch, *cure.split()[1:]) == 0
    assert len(clients_of(fed)) == 3
    assert check(fed)[0] == 0


CLIENTS = {
    "a share that is not there": ({"partition": 7}, "partition 7 of 3: they count from 0 to 2"),
    "one below 0": ({"partition": -1}, "partition -1 of 3: they count from 0 to 2"),
    "no app": ({"app": "os:system"}, 'app "os:system" is builtin_function_or_method, not a Client'),
    "no module": ({"app": "nowhere:app"}, 'app "nowhere:app" cannot be loaded: No module named'),
    "no name": ({"site": "os:nothing"}, 'site "os:nothing" cannot be loaded'),
    "no function": ({"site": "os:sep"}, 'site "os:sep" is str, not a function; give one of this'),
}


@pytest.mark.parametrize("case", CLIENTS)
def test_what_a_client_would_fail_of(case: str, fed: Path, check: Checked) -> None:
    more, words = CLIENTS[case]
    file = fed / "clients" / "client-1" / "client.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    code, _, err = check(file.parent)
    assert code == 2
    assert words in err


def test_an_app_of_this_installation_is_none_of_these(fed: Path, check: Checked) -> None:
    file = fed / "clients" / "client-1" / "client.json"
    more = {"app": "support.deployed_apps:client_app"}
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    assert check(file.parent)[0] == 0


def test_another_clients_key(fed: Path, check: Checked) -> None:
    """Where key.pub is missing as well, only the server can notice."""
    place = fed / "clients" / "client-1"
    shutil.copy(fed / "clients" / "client-0" / "key", place)
    code, _, err = check(place)
    assert code == 2
    assert f"{place}/key: not the key of {place}/key.pub, which the server knows" in err
    (place / "key.pub").unlink()
    assert check(place)[0] == 0
