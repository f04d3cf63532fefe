"""Python named in an experiment: loaded once, with modules beside it; mistakes have their place."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from fedshift.errors import InputError
from fedshift.experiments.config.python_names import (
    EXPECTS,
    PythonName,
    digest_of,
    is_python,
    load_python,
)

EXPECTED = EXPECTS["model.name"]


def is_network(value: object) -> bool:
    return isinstance(value, nn.Module)


def loaded(folder: Path, source: str, name: str = "Net") -> PythonName:
    path = folder / "net.py"
    path.write_text(source)
    return load_python("model.name", f"{path}:{name}")


def test_which_texts_are_names_of_python() -> None:
    assert all(map(is_python, ["net.py:Net", "a/b c.py:make_1", "C:\\x\\net.py:Net"]))
    assert not any(
        map(is_python, ["net.py", "net:Net", "net.py:", "net.py:1", "net.py:a.b", "mlp"])
    )


def test_a_class_and_a_function(tmp_path: Path) -> None:
    source = (
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self, task, width=3):\n        super().__init__(2, width)\n"
        "def make(input_shape, classes, *, width=3):\n    return nn.Linear(2, width)\n"
    )
    net, make = loaded(tmp_path, source), loaded(tmp_path, source, "make")
    assert isinstance(net.call(is_network, None), nn.Linear)
    assert make.call(is_network, None, 2, width=7).out_features == 7
    assert (net.needs, make.needs) == (1, 2)
    assert (net.line, make.line) == (2, 5)
    assert type(net.call(is_network, None)) is net.value


def test_two_names_of_one_file_run_it_once(tmp_path: Path) -> None:
    source = "class A: pass\ndef Net(): return A()\n"
    made, kind = loaded(tmp_path, source).value(), loaded(tmp_path, source, "A").value
    assert type(made) is kind
    again = load_python("method.name", f"{tmp_path}/net.py:A")
    assert again.value is kind


def test_a_file_runs_once_and_again_after_a_change(tmp_path: Path) -> None:
    first = loaded(tmp_path, "Net = lambda: 1\n").value
    assert loaded(tmp_path, "Net = lambda: 1\n").value is first
    assert loaded(tmp_path, "Net = lambda: 2\n").value() == 2


def test_files_beside_it_are_found_and_watched(tmp_path: Path) -> None:
    beside = tmp_path / "fedshift_test_beside.py"
    beside.write_text("WIDTH = 5\n")
    one = loaded(tmp_path, "from fedshift_test_beside import WIDTH\ndef Net(): return WIDTH\n")
    assert one.value() == 5
    assert one.files == {str(p): digest_of(p) for p in (beside, tmp_path / "net.py")}


def test_a_file_named_as_a_module_of_python_replaces_none(tmp_path: Path) -> None:
    import random

    (tmp_path / "random.py").write_text("def Net(): return 1\n")
    assert load_python("model.name", f"{tmp_path}/random.py:Net").value() == 1
    assert random.Random(0).random() == random.Random(0).random()


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("class Net: pass\ndef make(): pass\n", "Nett",
         f'there is no "Nett", it defines Net, make; expected {EXPECTED}. Did you mean "Net"?'),
        ("from torch import nn\n", "Net", 'there is no "Net", it defines no function or class; '),
        ("Net = 3\n", "Net", "is int 3; expected a class or function"),
        ("x = 1\ny = z\n", "Net", "net.py, line 2: NameError: name 'z' is not defined"),
        ("def Net(:\n", "Net", "net.py, line 1: SyntaxError: invalid syntax"),
        ("import nowhere_to_be_seen\n", "Net", "line 1: ModuleNotFoundError: No module named"),
        ("import sys\nsys.exit(2)\n", "Net", "net.py, line 2: SystemExit: 2"),
        ("from fedshift.errors import InputError\nraise InputError('as is')\n", "Net",
         "net.py, line 2: as is"),
        ("from .other import y\n", "Net", "line 1: ImportError: attempted relative import with no "
         "known parent package; files beside it are imported by their names alone, as in import"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_loaded(tmp_path: Path, source: str, name: str, message: str) -> None:
    with pytest.raises(InputError) as e:
        loaded(tmp_path, source, name)
    assert message in str(e.value)
    assert str(e.value).startswith(f'model.name = "{tmp_path}/net.py:{name}"')
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def Net(task):\n    return task.nothing\n",
         "net.py, line 2: AttributeError: 'int' object has no attribute 'nothing'; expected "),
        ("\ndef Net(task):\n    return 'net'\n", "net.py, line 2) returned str 'net'; expected "),
        ("def Net(task):\n    pass\n", "net.py, line 1) returned nothing (None); expected "),
        ("\ndef Net(a, b):\n    pass\n",
         "net.py, line 2: TypeError: Net() missing 1 required positional argument"),
    ],
)  # fmt: skip
def test_calls_that_go_wrong(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(InputError) as e:
        loaded(tmp_path, source).call(is_network, 1)
    assert message in str(e.value)
    assert str(e.value).endswith(EXPECTED)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="net.py: there is no such file"):
        load_python("model.name", f"{tmp_path}/net.py:Net")
    (tmp_path / "a.py").mkdir()
    with pytest.raises(InputError, match="a.py: cannot be read"):
        load_python("model.name", f"{tmp_path}/a.py:Net")
    with pytest.raises(InputError, match="write it as FILE.py:NAME"):
        load_python("model.name", "net")


def test_each_file_imports_what_lies_beside_it(tmp_path: Path) -> None:
    """Where two folders have files of the same name."""
    for i, folder in enumerate(("a", "b", "a")):
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        (place / "beside_both.py").write_text(f'where = "{folder}"\n')
        (place / "net.py").write_text(
            f"import beside_both\ndef f(): return beside_both.where  # {i}\n"
        )
        named = load_python("model.name", f"{place / 'net.py'}:f")
        assert named.value() == folder
        assert str(place / "beside_both.py") in named.files
