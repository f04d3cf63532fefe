"""Lines of keys in TOML, tested on a text in which every number is the number of its line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedshift.errors import InputError
from fedshift.experiments.config.load import load_config
from fedshift.experiments.config.toml_lines import Key, lines_of

TEXT = r"""top = 1
a.b = 2  # a.c = 9
"a" . 'd e'.f = 3
text = QQQ
[no.section]
key = 7  # " \QQQ "" \""QQQ
[plain]  # [other]
x = 8
one = { y = 9, z.w = 9, in = { v = 9 }, list = [9, { u = 9 }] }
'#' = 10
"=[\u0061\"" = 11
literal = '''
y = "[" '' ''''
list = [
  15, 15,  # , 99
  [ 16,
    17 ], { k = 17 },
  { k = 18, "m" = [18] },
]
float = -2.0
date = 1979-05-27T07:32:00.5Z
[ plain . "sub.sub" ]
x = 23
[[many]]
x = 25
inner = [{ x = 26 }, { x = 26 }]
[many.below]
x = 28
[[many.more]]
x = 30
[[many]]
x = 32
[[many.more]]
x = 34
[[many.more]]
x = 36
[many.more.end]
x = 38
[empty]
[plain.last]
x=41""".replace("QQQ", '"' * 3)


def numbers(value: Any, key: Key = ()) -> dict[Key, int]:
    """All integers of parsed tables with their keys."""
    if isinstance(value, dict):
        inner = [numbers(v, (*key, k)) for k, v in value.items()]
    elif isinstance(value, list):
        inner = [numbers(v, (*key, str(i))) for i, v in enumerate(value)]
    else:
        return {key: value} if type(value) is int else {}
    return {k: v for one in inner for k, v in one.items()}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_every_number_is_found_on_its_line(newline: str) -> None:
    text = TEXT.replace("\n", newline)
    wanted = numbers(tomllib.loads(text))
    lines = lines_of(text)
    assert len(wanted) == 29
    assert {key: lines.get(key) for key in wanted} == wanted
    assert lines_of(newline + text)[("top",)] == 2


def test_sections_are_located_at_their_first_header() -> None:
    lines = lines_of(TEXT)
    assert lines[("plain",)] == 7
    assert lines[("plain", "sub.sub")] == 22
    assert lines[("many",)] == lines[("many", "0")] == 24
    assert lines[("many", "1")] == 31
    assert lines[("many", "1", "more", "1", "end")] == 37
    assert lines[("empty",)] == 39
    assert ("no",) not in lines
    assert ("a", "c") not in lines


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[training]\nrounds = "two"\n', 2),
        ('[training]  # local work\nrounds = "two"\n', 2),
        ('# [training]\n\n[ "training" ]#\n\n\'rounds\' = "two"', 5),
        ('name = "x"\ntraining = { rounds = "two" }\n', 2),
        ('training = { lr = 0.1, rounds = "two" } # rounds = 1\n', 1),
        ('name = "x"\ntraining.lr = 0.1\ntraining . "rounds" = "two"\n', 3),
        ('name = """\n[training]\nrounds = 1"""\n[training]\nrounds = "two"', 5),
        ('[model]\nname = "mlp"\nhidden = [\n  200,\n  "two",\n]', 5),
        ('[[training]]\nrounds = "two"', 1),
    ],
)
def test_mistakes_are_reported_with_their_line(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "f.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_config(path)
    assert f"{path}:{line}: " in str(caught.value)


def test_arrays_may_be_as_deep_as_the_parser_reads_them() -> None:
    depth = 400
    assert lines_of("x = " + "[" * depth + "\n" + "]" * depth + "\ny = 1")[("y",)] == 3
