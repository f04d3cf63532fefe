"""A site's rows against the declaration: messages for its operator and for the server."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift.cli.app import main
from fedshift.errors import InputError
from fedshift.experiments.config.data import Data
from fedshift.experiments.config.load import dumps, load_config
from fedshift.experiments.task.preparing import prepare
from fedshift.tasks.names import Coded
from fedshift_deploy.processes import free_port
from fedshift_deploy.sites.check import check_site
from fedshift_deploy.sites.rows import SiteError, SiteTable, rows_of_site
from support.command_line import code_of
from support.own_sites import FILE

DATA = Data(
    source="sites",
    clients=("a", "b"),
    label="outcome",
    classes=("well", "ill"),
    columns=("age", "ward"),
    values={"ward": ("surgery", "medicine")},
)
TABLE = "age,ward,outcome\n60,surgery,ill\n?,medicine,well\n71,,ill\n"
SITE = '[data]\nsource = "data.csv"\n'


def site(folder: Path, table: str = TABLE, file: str = SITE) -> Path:
    (folder / "data.csv").write_text(table)
    (folder / "site.toml").write_text(file)
    return folder


def test_columns_in_the_experiments_order_and_names(tmp_path: Path) -> None:
    table = "Ausgang;Station;name;Alter\nill;surgery;x;60,5\nwell;;y;?\n;medicine;z;71\n"
    file = SITE + 'label = "Ausgang"\ncolumns = {age = "Alter", ward = "Station"}\n'
    rows = rows_of_site(site(tmp_path, table, file), DATA)
    age, ward = (rows.inputs.of[name] for name in ("age", "ward"))  # type: ignore[index]
    assert not isinstance(age, Coded)
    assert isinstance(ward, Coded)
    assert age.dtype == np.float64
    np.testing.assert_array_equal(age, [60.5, np.nan, 71.0])
    assert [ward.names[c] if c >= 0 else "" for c in ward.codes] == ["surgery", "", "medicine"]
    assert rows.codes.tolist() == [1, 0, -1]


BAD = {
    "a column that is not there": (
        "Age,ward,outcome\n60,surgery,ill\n",
        r'data.csv has no column "age"; it has Age, ward, outcome. Did you mean "Age"\? Where it '
        "has another name, say so in site.toml",
        'column "age" is missing',
    ),
    "text among numbers": (
        "age,ward,outcome\n60,surgery,ill\nold,medicine,well\n71,surgery,ill\n",
        r'column "age": .*data.csv, line 3: "old"; the experiment declares numbers',
        'column "age": the experiment declares numbers',
    ),
    "text alone": (
        "age,ward,outcome\nold,surgery,ill\nyoung,medicine,well\n",
        r'column "age": .*data.csv, line 2: "old"; the experiment declares numbers',
        'column "age": the experiment declares numbers',
    ),
    "another category": (
        "age,ward,outcome\n60,surgery,ill\n61,medecine,well\n",
        r'column "ward": .*line 3: "medecine"; the experiment declares surgery, medicine. Did you '
        r'mean "medicine"\?',
        'column "ward": the experiment declares surgery, medicine',
    ),
    "another class": (
        "age,ward,outcome\n60,surgery,ill\n61,medicine,dead\n",
        r'column "outcome": .*line 3: "dead"; the classes are well, ill',
        'column "outcome" has a label that is none of the classes: well, ill',
    ),
    "no label": ("age,ward,outcome\n60,surgery,\n", "no row has a label", "nothing to train on"),
    "no rows": ("", "data.csv is empty", "its data cannot be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit(case: str, tmp_path: Path) -> None:
    table, detail, public = BAD[case]
    with pytest.raises(SiteError) as e:
        rows_of_site(site(tmp_path, table), DATA)
    assert str(e.value) == public
    with pytest.raises(InputError, match=detail):
        raise InputError(e.value.detail)


FILES = {
    "nothing": ("", r"site.toml: data = {}: field required"),
    "another key": ('[data]\nsource = "data.csv"\nlabels = "y"\n', r'site.toml:3: unknown key "da'),
    "another column": (SITE + 'columns = {aeg = "x"}\n', r'columns: "aeg" is none .* mean "age"\?'),
    "no file": ('[data]\nsource = "date.csv"\n', r"there is no file .*date.csv. Did you mean"),
    "no table": ('[data]\nsource = "data.npz"\n', r"data.npz: no CSV file; for all else give a fu"),
    "no function": ('[data]\nsource = "s.py:load"\n', r"s.py: there is no such file"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_site_file_that_cannot_be_used(case: str, tmp_path: Path) -> None:
    file, detail = FILES[case]
    with pytest.raises(SiteError, match="^its data cannot be read$") as e:
        rows_of_site(site(tmp_path, file=file), DATA)
    with pytest.raises(InputError, match=detail):
        raise InputError(e.value.detail)


def test_a_functions_table(tmp_path: Path) -> None:
    """Control: the same rows as the file's."""
    here = site(tmp_path, file='[data]\nsource = "site.py:load"\n')
    (here / "site.py").write_text(
        "import pathlib, pandas\n"
        "def load():\n"
        "    return pandas.read_csv(pathlib.Path(__file__).with_name('data.csv'), na_values='?')\n"
    )
    ours = rows_of_site(here, DATA)
    (here / "site.toml").write_text(SITE)
    theirs = rows_of_site(here, DATA)
    assert ours.codes.tolist() == theirs.codes.tolist()
    for name in ("age", "ward"):
        one, two = (rows.inputs.of[name] for rows in (ours, theirs))  # type: ignore[index]
        np.testing.assert_array_equal(
            one.codes if isinstance(one, Coded) else one,
            two.codes if isinstance(two, Coded) else two,
        )


def test_missing_values_are_refused_with_their_line(tmp_path: Path) -> None:
    with pytest.raises(SiteError) as e:
        rows_of_site(site(tmp_path), DATA.model_copy(update={"missing": "refuse"}))
    assert str(e.value) == 'column "age": the experiment has missing = "refuse"'
    assert "data.csv, line 3: no value" in e.value.detail


DECLARED = {
    "no clients": ('clients = ["coast", "east", "south"]\n', "", "clients is missing"),
    "one class": ('["well", "ill"]', '["well"]', "classes is missing or has less than two"),
    "neither": ('columns = ["age", "sex", "day", "marker", "ward"]', "", "give columns, the col"),
    "a path": ("[model]", 'separator = ";"\n[model]', "separator is for data that lie beside"),
    "a number of rows": ('"day", ', '"day_id", ', 'columns: "day_id" is called as numbers of rows'),
    "a category": ('["sex", "ward"]', '["sex", "wards"]', 'categories: "wards" is none of col'),
    "a client as target": (
        "{well = 0.3, ill = 0.7}",
        '"east"',
        'target = "east" trains, too; give lab',
    ),
    "no model for all": ('"fedpals"\ness = 0.5', '"fedper"', "leaves every client with a model of"),
    "too few": ('"fedpals"\ness = 0.5', '"krum"\nbyzantine = 1', "too few for method.byz"),
    "the oracle": ('"fedpals"\ness = 0.5', '"oracle"', "draws clients from all rows, and with"),
    "no values": ("[model]", "values = {ward = []}\n[model]", 'values: "ward" has an empty list'),
    "one text twice": (
        "[model]",
        'values = {ward = ["a", "a"]}\n[model]',
        "one of its texts twice",
    ),
    "a line in a name": ('"coast"', r'"coast\n[x]"', r'clients: "coast\n[x]" has a control char'),
    "a line in the label": ('"outcome"', r'"out\ncome"', r'label: "out\ncome" has a control char'),
    "numbers": ("[model]", 'kind = "regression"\n[model]', "sites train classifiers"),
    "labels": (
        "{well = 0.3, ill = 0.7}",
        "{well = 0.3, iil = 0.7}",
        'the label "iil" is not among',
    ),
}


@pytest.mark.parametrize("case", DECLARED)
def test_declarations_are_refused_at_init(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, words = DECLARED[case]
    assert old in FILE
    (tmp_path / "f.toml").write_text(FILE.replace(old, new))
    argv = ["fedshift", "deploy", "init", str(tmp_path / "f.toml"), str(tmp_path / "fed")]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as e:
        main()
    assert e.value.code == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "fed").exists()


HEAD = "age,sex,day,marker,ward,outcome\n"
GOOD = "60,f,1,0.1,surgery,ill\n61,m,2,,medicine,well\n"
TARGETS = {
    "as it should be": (HEAD + GOOD, 0, ""),
    "no file": (None, 3, "there is no file"),
    "no column": (
        HEAD.replace("ward", "wing") + GOOD, 3, 't.csv has no column "ward"; it has age, sex, day'),
    "another class": (HEAD + GOOD.replace("ill", "dead"), 2, 't.csv: the label "dead" is not am'),
    "no label": (HEAD + "60,f,1,0.1,surgery,\n", 2, "t.csv: no row has a label in the column"),
    "text": (HEAD + GOOD.replace("61", "old"), 2, 't.csv: column "age" holds "old"'),
    "a gap": (HEAD + GOOD, 2, 't.csv: column "marker" has no value in 1 rows'),
}  # fmt: skip


@pytest.mark.parametrize("case", TARGETS)
def test_a_table_of_the_target_is_read_at_init(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, code, words = TARGETS[case]
    more = '\nmissing = "refuse"' * (case == "a gap")
    text = FILE.replace("{well = 0.3, ill = 0.7}", f'"t.csv"{more}')
    (tmp_path / "f.toml").write_text(text)
    if table is not None:
        (tmp_path / "t.csv").write_text(table)
    assert (
        code_of(monkeypatch, "deploy", "init", *map(str, (tmp_path / "f.toml", tmp_path / "fed")))
        == code
    )
    assert words in capsys.readouterr().err
    assert (tmp_path / "fed").exists() == (code == 0)


def test_the_folder_of_a_site_and_its_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, fed = tmp_path / "f.toml", tmp_path / "fed"
    file.write_text(FILE)
    for argv, code, words in (
        (
            ["init", str(file), str(fed)],
            0,
            "client-0 is coast, client-1 is east, client-2 is south",
        ),
        (["check", str(fed), "--port", str(free_port())], 0, "3 clients' keys"),
        (["check", str(fed / "clients" / "client-1")], 2, "there is no file"),
    ):
        monkeypatch.setattr("sys.argv", ["fedshift", "deploy", *argv])
        with pytest.raises(SystemExit) if code else contextlib.nullcontext() as e:
            main()
        assert e is None or e.value.code == code
        printed = capsys.readouterr()
        assert words in " ".join((printed.out + printed.err).split()), argv
    place = fed / "clients" / "client-1"
    assert "Where east's own rows are" in (place / "site.toml").read_text()
    head = "age,sex,day,marker,ward,outcome\n"
    (place / "data.csv").write_text(head + "60,f,20240001,0.1,surgery,ill\n61,m,20240002,,,\n")
    assert check_site(place, 1) == [
        "2 rows: well 0, ill 1; 1 without a label",
        "  age: numbers from 60 to 61; 0 missing",
        "  sex: f, m; 0 missing",
        "  day: numbers from 2.024e+07 to 2.024e+07; 0 missing",
        "  marker: numbers from 0.1 to 0.1; 1 missing",
        "  ward: surgery; 1 missing",
        'client-1 ("east"): 2 rows of data.csv; the data fit the experiment; nothing was sent',
    ]
    # Numbers may be counted in another order here: the message says how they were read.
    (place / "data.csv").write_text(head + "60,f,20240001,0.1,surgery,1\n61,m,20240002,,,0\n")
    assert check_site(place, 1)[:2] == [
        "2 rows: well 1, ill 1; 0 without a label",
        "  outcome: numbers of classes: 0 is well, 1 is ill",
    ]
    with pytest.raises(InputError, match=r"toml: has 3 clients, and client.json says client-3; ta"):
        check_site(place, 3)
    # Two mistakes, two lines.
    (place / "site.toml").write_text('[data]\nsorce = "data.csv"\n')
    with pytest.raises(InputError, match=r"unknown key \"data.sorce\".*\n.*required"):
        check_site(place, 1)


def test_a_run_in_one_process_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(FILE)
    with pytest.raises(InputError, match=r'data.source = "sites": the rows are on the clients'):
        prepare(load_config(tmp_path / "f.toml"))


def test_every_key_of_a_site_file_is_documented() -> None:
    page = (
        (Path(__file__).parents[2] / "docs" / "files.md").read_text().partition("site.toml`\n")[2]
    )
    assert all(f"`{key}`" in page for key in SiteTable.model_fields)


def test_data_of_ones_own_have_no_shift_in_files(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(FILE)
    config = load_config(tmp_path / "f.toml")
    assert "[shift]" not in dumps(config)
    (tmp_path / "g.toml").write_text(dumps(config))
    assert load_config(tmp_path / "g.toml") == config
    (tmp_path / "h.toml").write_text('[data]\nname = "fashion-mnist"\n')
    assert "[shift]" in dumps(load_config(tmp_path / "h.toml"))
