"""Rewrites the library's messages about Python in terms of TOML files and command options."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from fedshift.errors import InputError

# What is set by a class in Python, and the key that sets it in a file.
_ELSEWHERE = (
    (r"\bLocal\((\w+)=([^()]+)\)", r"training.\1 = \2"),
    (r"\bSetting\((?:\.\.\., )?rounds=([^()]+)\)", r"training.rounds = \1"),
    (
        r"\bSetting\(\.\.\., server_inputs=x\), x \[n, \.\.\.\] like the clients' inputs",
        "server.unlabeled = n, the number of inputs that the server holds",
    ),
    (
        r"\bSetting\(\.\.\., server_examples=fedshift\.data\.Examples\(x, y\)\)",
        "server.validation = n, the number of examples that the server holds",
    ),
    (r"\bleave it out of Sgd\([^()]*\)", "leave out training.server_momentum"),
    (
        r"\bleave out Sgd\([^()]*\)",
        "leave out training.server_lr and training.server_momentum",
    ),
    (r"^rounds=(\d+) of the run", r"training.rounds = \1"),
    (r"\bIid\(\)", 'shift.kind = "iid"'),
)
_KEY = re.compile(
    r"(?<![\w./])(?:data|shift|server|model|method|training|selection|seeds)(?:\.(?=[a-z_])|\])"
)


def reworded(message: str, names: Mapping[str, str], equals: str) -> str:
    """The message with other names for arguments of Python, `equals` between name and value.

    Only at the start (maybe after a class) or before `=` is a word taken for an argument: many
    arguments are everyday words.
    """
    for name, other in names.items():
        message = re.sub(
            rf"^(?:{name}(?=[ :\[=])|[A-Z]\w*(?:'s)? {name}(?= must ))", other, message
        )
        message = re.sub(rf"(?<![\w.-]){name}=(?=\S)", f"{other}{equals}", message)
        message = re.sub(rf"^{re.escape(other)}=(?=\S)", f"{other}{equals}", message)
    return message


def file_words(message: str, section: str, names: Mapping[str, str]) -> str:
    """The message with keys of a file in place of arguments: `method.mu must be ...`.

    names: an argument in Python -> its key in the section. A message that names no key starts with
    the section's name.
    """
    for pattern, key in _ELSEWHERE:
        message = re.sub(pattern, key, message)
    message = reworded(message, {name: f"{section}.{key}" for name, key in names.items()}, " = ")
    for name, key in names.items():
        if name != key:
            message = re.sub(rf"(?<![\w.]){name}\b", f"{section}.{key}", message)
    message = re.sub(r"(?<= = )(True|False)\b", lambda value: value[0].lower(), message)
    return message if _KEY.search(message) else f"[{section}]: {message}"


@contextlib.contextmanager
def in_file_words(section: str, names: Mapping[str, str]) -> Iterator[None]:
    """Rewrite the messages of InputErrors raised within by `file_words`."""
    try:
        yield
    except InputError as e:
        e.args = (file_words(str(e), section, names),)
        raise
