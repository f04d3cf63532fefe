"""Sorting the keywords of `fit` into options of the method and keys of the configuration.

Also rewrites errors about keys of files in terms of Python's keywords and the clients' names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fedshift import recipes
from fedshift.errors import FedshiftError, InputError, nearest, shown
from fedshift.experiments.config.schema import Network, Selection, Training
from fedshift.fitting.methods import Method, foreign_option, plain_number
from fedshift.real import described

SECTIONS = {
    "training": set(Training.model_fields),
    # As a keyword, `weights` is the method's rule for client weights, and not a file of first
    # weights: a network made in Python has its weights already.
    "model": set(Network.model_fields) - {"name", "weights"},
    "selection": set(Selection.model_fields),
}
# Arguments of `fit` itself.
ARGUMENTS = (
    "method", "seed", "name", "metrics", "loss", "class_weights", "head", "callbacks", "loggers",
    "backend", "workers", "progress", "folder", "resume",
)  # fmt: skip
ELSEWHERE = {
    "validation": "Task.from_...(validation=0.2): the task is cut there",
    "test": "Task.from_...(test=0.2): the task is cut there",
    "target": "Task.from_...(target=...)",
    "client": "Task.from_...(client=...)",
    "clients": "Task.from_...(client=...)",
    "label": "Task.from_...(label=...)",
    "seeds": "fs.compare(..., seeds=5); fit has one seed=0",
    "early_stopping": "patience=n, the number of evaluations without a better one",
    "fraction_fit": "cohort=n, the number of clients drawn per round",
    "num_clients": "cohort=n for the number drawn per round; how many there are, the task says",
    "device": 'backend="cuda" for a GPU; without backend, the processor trains',
    "gpu": 'backend="cuda"',
    "unlabeled": "[server] unlabeled = n in an experiment file, which `fedshift run` trains",
    "server": "[server] unlabeled = n in an experiment file, which `fedshift run` trains",
}
# Other libraries' names for keys that take the same value.
RENAMED = {
    "learning_rate": "lr",
    "batch_size": "batch",
    "weight_decay": "decay",
    "clients_per_round": "cohort",
}


def sorted_keys(
    chosen: Method, keys: Mapping[str, Any], *, with_options: bool
) -> dict[str, dict[str, Any]]:
    """The keywords by the section to which they belong: {"method": ..., "training": ..., ...}.

    with_options: whether the method's options may be among the keywords; not if `fs.method` has
    fixed them already.

    Raises InputError for an unknown keyword, with the nearest match and where it belongs, and for
    one that is both an option of the method and a key of training.
    """
    options = set(chosen.recipe.options) if with_options else set[str]()
    tables: dict[str, dict[str, Any]] = {"method": dict(chosen.options)}
    tables |= {section: {} for section in SECTIONS}
    for key, value in keys.items():
        homes = [s for s, names in {"method": options, **SECTIONS}.items() if key in names]
        if not homes:
            raise InputError(_unknown(key, value, chosen))
        if len(homes) > 1:
            raise InputError(_ambiguous(key, chosen))
        tables[homes[0]][key] = plain_number(value)
    return tables


def _ambiguous(key: str, chosen: Method) -> str:
    name = chosen.recipe.name
    given = name if chosen.custom else f'"{name}"'
    return (
        f"{key}: an option of {name} and of local training as well; write fs.method({given}, "
        f"{key}=...) for the option, or method=fs.method({given}), {key}=... for training"
    )


def _unknown(key: str, value: object, chosen: Method) -> str:
    if key in RENAMED:
        return f'fit has no "{key}": write {RENAMED[key]}={described(value)}'
    if key in ELSEWHERE:
        return f'fit has no "{key}": write {ELSEWHERE[key]}'
    if key in chosen.recipe.options:
        name = chosen.recipe.name
        return (
            f"{key}: an option of {name}, which fs.method has made already; write it there, as in "
            f"fs.method(..., {key}=...)"
        )
    if any(key in one.options for one in recipes.recipes()):
        return foreign_option(key, chosen.recipe)
    allowed = [
        *ARGUMENTS,
        *chosen.recipe.options,
        *(k for names in SECTIONS.values() for k in names),
    ]
    hint = nearest(key, allowed)
    options = ", ".join(chosen.recipe.options) or "none"
    more = "" if hint else f" Training keys: {', '.join(sorted(SECTIONS['training']))}."
    return (
        f'fit has no keyword "{shown(key)}".{hint} Options of {chosen.recipe.name}: {options}.'
        f"{more}"
    )


# (pattern of a message about a file, how to say it to a Python program), tried in this order.
WORDS = (
    (r"^(?:fit|config): ", ""),
    (r"^\[(?:method|training|model|selection|data|shift)\]: ", ""),
    (r"\bgive another --out", "give another folder"),
    (
        r"\bgive server\.(unlabeled|validation) = n, the number of \w+ that the server holds",
        r"fit gives the server none: train from an experiment file with [server] \1 = n",
    ),
    (r'Set shift\.target = "clients"', 'Make the task with target="clients"'),
    (r"\bSetting\.head = \[([^\]]*)\]", r"head=(\1,)"),
    (r"\bSetting\(head=\.\.\.\)", "head=(...)"),
    (r"\braise data\.validation", "raise validation= of the task"),
    (r"\b(?:training|method|model|selection|data|shift)\.(\w+) = ", r"\1="),
    (r"\b(?:training|method|model|selection|shift)\.(?=[a-z])", ""),
)


@contextmanager
def in_python_words() -> Iterator[None]:
    """Within the block, InputErrors name keywords for keys of files: lr=0 for training.lr = 0."""
    try:
        yield
    except InputError as e:
        text = str(e)
        for pattern, words in WORDS:
            text = re.sub(pattern, words, text, flags=re.M)
        e.args = (text,)
        raise


@contextmanager
def by_name(clients: Sequence[str]) -> Iterator[None]:
    """Within the block, errors have clients' names for numbers, and keywords for keys of files."""
    try:
        with in_python_words():
            yield
    except FedshiftError as e:
        if e.args:
            e.args = (with_names(str(e.args[0]), clients), *e.args[1:])
        raise


def with_names(text: str, clients: Sequence[str]) -> str:
    """A message with names for numbers of clients: `client "north"` for client 2."""

    def named(match: re.Match[str]) -> str:
        i = int(match[1])
        return f'client "{clients[i]}"' if i < len(clients) else match[0]

    return re.sub(r"\bclient (\d+)\b", named, text)
