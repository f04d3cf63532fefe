"""Python that an experiment file names, as "net.py:Net": loading and calling it.

Errors name the user's file and line. Loading runs the file. Only commands whose user has named the
experiment do so; an experiment that came by message never does.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from fedshift.errors import InputError, nearest, shown
from fedshift.experiments.config.user_code import described, line_in, line_of, raised

# The source of data, and the name of a network or method, if a program gave them as objects.
PYTHON = "python"
# The source of the library's tables with natural clients.
NATURAL = "natural"
# The source of data that stay on the clients' machines.
SITES = "sites"
# What FILE.py:NAME must be, for each key that takes it.
EXPECTS = {
    "data.source": "a function without arguments that gives a fedshift.Task",
    "site.source": "a function without arguments that gives a table (a DataFrame or a dict of "
    "columns), or a pair (x, y) of inputs and labels",
    "model.name": "a class or function of the task (or of its input shape and number of outputs) "
    "that gives a torch.nn.Module",
    "method.name": "a function (setting, *, options) that gives an Algorithm, as a recipe does",
    "metrics.extra": "a function of (probabilities [n, K], labels [n]) that gives a number",
}
# Endings of files that are tables.
TABLES = (".csv", ".tsv", ".txt", ".gz", ".parquet")
# The folders of the files loaded so far, the latest first.
_FOLDERS: list[str] = []
_NAME = re.compile(r"(?P<file>.+\.py):(?P<name>[^\W\d]\w*)")


def is_python(text: str) -> bool:
    """Whether a text has the form FILE.py:NAME."""
    return _NAME.fullmatch(text) is not None


@dataclass(frozen=True)
class PythonName:
    """The function or class behind FILE.py:NAME in an experiment file.

    where    the key and its value, for messages: 'model.name = "net.py:Net"'
    expects  what that key has to name, for messages
    files    SHA-256 of the file, and of files in its folder that it imports, by path
    """

    where: str
    value: Callable[..., Any]
    path: Path
    expects: str
    files: Mapping[str, str]

    def call(self, fits: Callable[[Any], bool], *given: Any, **options: Any) -> Any:
        """Call it, and give what it returns.

        Raises InputError, with file and line, if it fails or `fits` refuses what it returns.
        """
        try:
            value = self.value(*given, **options)
        except (Exception, SystemExit) as e:
            place = "" if line_in(self.path, e) else f"{self.place}: "
            raise InputError(
                f"{self.where}: {place}{raised(e, self.path)}; expected {self.expects}"
            ) from e
        if not fits(value):
            raise InputError(
                f"{self.where} ({self.place}) returned {described(value)}; expected {self.expects}"
            )
        return value

    @contextlib.contextmanager
    def placing(self) -> Iterator[None]:
        """Within the block, errors of an object that it made get its file and line in front."""
        try:
            yield
        except InputError as e:
            place = line_in(self.path, e.__cause__ or e) or f"{self.place}: "
            e.args = (f"{self.where}: {place}{e}",)
            raise

    @property
    def place(self) -> str:
        """ "net.py, line 3"."""
        return f"{self.path}, line {self.line}"

    @property
    def line(self) -> int:
        """The line in its file where it is defined; 1 if it is not written there."""
        return line_of(self.value)

    @property
    def needs(self) -> int:
        """The number of positional arguments without a default; 1 if Python cannot tell."""
        try:
            parameters = inspect.signature(self.value).parameters.values()
        except (TypeError, ValueError):
            return 1
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return sum(p.kind in positional and p.default is p.empty for p in parameters)


def load_python(key: str, text: str) -> PythonName:
    """The function or class that `key = "FILE.py:NAME"` names, after running FILE.py.

    A process runs a file once, and again if it has changed. It can import files beside it. Raises
    InputError, with file and line, for a file that is missing or raises, and for a name that it
    lacks or that cannot be called.
    """
    expects = EXPECTS[key]
    where, match = f'{key} = "{shown(text, 200)}"', _NAME.fullmatch(text)
    if match is None:
        raise InputError(f"{where}: write it as FILE.py:NAME, as in net.py:Net")
    path, name = Path(match["file"]), match["name"]
    source = _content(path, where)
    try:
        module, files = _module(path, source)
    except (Exception, SystemExit) as e:
        raise InputError(f"{where}: {raised(e, path)}") from e
    names = [
        one for one, v in vars(module).items()
        if callable(v) and getattr(v, "__module__", None) == module.__name__
    ]  # fmt: skip
    if not hasattr(module, name):
        has = f"it defines {', '.join(names)}" if names else "it defines no function or class"
        raise InputError(
            f'{where}: there is no "{name}", {has}; expected {expects}.{nearest(name, names)}'
        )
    value = getattr(module, name)
    if not callable(value):
        raise InputError(f"{where} is {described(value)}; expected {expects}")
    return PythonName(where, value, path, expects, files)


def digest_of(path: Path) -> str | None:
    """SHA-256 of a file; None if it cannot be read or is a folder."""
    try:
        with path.open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError:
        return None


def _content(path: Path, where: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{where}: {path}: there is no such file") from None
    except OSError as e:
        raise InputError(f"{where}: {path}: cannot be read: {e.strerror}") from None


@cache
def _module(path: Path, source: bytes) -> tuple[ModuleType, Mapping[str, str]]:
    """(the module of a file with this content, SHA-256 of what it imports from its folder)."""
    _look_in(path.parent)
    digest = hashlib.sha256(source).hexdigest()
    # The digest in the name keeps a user's random.py from replacing Python's module, and a net.py
    # from replacing the net.py of another folder.
    module, before = ModuleType(f"{path.stem}_{digest[:12]}"), set(sys.modules)
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    try:
        # The text that was read is compiled here: a .pyc could be of an earlier text.
        exec(compile(source, str(path), "exec"), vars(module))
    except BaseException:
        del sys.modules[module.__name__]
        raise
    beside = {
        file for one in set(sys.modules) - before - {module.__name__}
        if (file := getattr(sys.modules[one], "__file__", None))
        and Path(file).parent == path.parent
    }  # fmt: skip
    digests = {file: digest_of(Path(file)) or "" for file in sorted(beside)}
    return module, MappingProxyType({str(path): digest, **digests})


def _look_in(folder: Path) -> None:
    """Let files of this folder import one another, before files of the same name elsewhere."""
    if (place := str(folder)) in _FOLDERS[:1]:
        return
    others = {Path(one) for one in _FOLDERS} - {folder}
    for name, one in list(sys.modules.items()):
        file = Path(getattr(one, "__file__", None) or "")
        if file.stem == name and file.parent in others and (folder / file.name).is_file():
            del sys.modules[name]
    if place in sys.path and place not in _FOLDERS:
        return  # the user's program has put it there itself, where we leave it
    sys.path[:] = [one for one in sys.path if one not in (*_FOLDERS, place)]
    _FOLDERS[:] = [place, *(one for one in _FOLDERS if one != place)]
    sys.path += _FOLDERS  # at the end, so that a user's file hides no installed package
