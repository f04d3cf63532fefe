"""Reading a configuration. Error messages name file, line and key, and say what is allowed."""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from fedshift import recipes
from fedshift.errors import InputError, nearest, shown
from fedshift.experiments.config.method_fit import Problem, misfits
from fedshift.experiments.config.named_files import placed, relative, with_paths
from fedshift.experiments.config.places import Source, keys_set
from fedshift.experiments.config.python_names import PYTHON, is_python, load_python
from fedshift.experiments.config.schema import Config, Data, Method
from fedshift.experiments.config.shift import Split

Tables = dict[str, Any]
S = TypeVar("S", bound=BaseModel)
MOST, MOST_SHOWN = 1_000_000, 20

# Some options mean something else after -c has changed the section's name. Then -c must set them,
# too. For one option: what it means -> the names under which it means that.
Meanings = Mapping[str, tuple[str, ...]]
# The key that names what a section's options belong to.
NAMES = {"method": "name", "model": "name", "shift": "kind"}
# Options with several meanings; those of methods are in `recipes`.
OTHERWISE: Mapping[str, Meanings] = {
    "model.projection": {
        "the width of a linear layer before the classifier": ("resnet18", "resnet50"),
        "the width of the projection head": ("lenet-moon", "mlp-moon"),
    },
    "shift.beta": {
        "how evenly a client's examples are shared among the labels": ("dirichlet-per-client",),
        "how evenly a label's examples are shared among the clients": ("dirichlet-per-class",),
        "how even the clients' sizes are": ("quantity",),
    },
}


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read FILE.toml, apply `section.key=value` overrides, validate. Raises InputError."""
    return load_with_source(path, overrides)[0]


def load_with_source(path: Path, overrides: Sequence[str] = ()) -> tuple[Config, Source]:
    """`load_config`, and a Source, which can say for later messages where a key was set."""
    text = _text(path)
    tables = _tables(path, text)
    if not tables and not overrides:
        raise InputError(f"{path}: no key is set; an experiment begins with [data] and its name")
    written = _name_in(tables, "method")
    apply_overrides(tables, overrides)
    renamed = _name_in(tables, "method") != written
    tables = with_paths(tables, lambda text: placed(text, path.parent))
    dropped = _drop_foreign_options(tables, keys_set(tuple(overrides))) if renamed else ()
    config = validate(tables, text=text, origin=str(path), overrides=overrides)
    return config, Source(str(path), text, tuple(overrides), dropped)


def read_section(path: Path, kind: type[S]) -> S:
    """A TOML file of another schema, such as a client's. Raises InputError as `load_config`."""
    text = _text(path)
    try:
        return kind.model_validate(_tuples(_tables(path, text)))
    except ValidationError as e:
        source = Source(str(path), text)
        # Unknown keys first: an unknown key may be a misspelling of one reported as missing.
        errors = sorted(e.errors(), key=lambda one: one["type"] != "extra_forbidden")
        lines = [source.placed(why, key) for key, why in _group(errors, kind)]
        raise InputError("\n".join(lines)) from None


def _tables(path: Path, text: str) -> Tables:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise InputError(f"{path}: not valid TOML: {e}") from None
    except (RecursionError, ValueError) as e:  # tables within tables; numbers of 5,000 digits
        raise InputError(f"{path}: no configuration: {e}") from None


def _text(path: Path) -> str:
    """The text of a file of at most MOST bytes; a byte-order mark is skipped."""
    try:
        with path.open("rb") as f:
            content = f.read(MOST + 1)
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file") from None
    except OSError as e:
        raise InputError(f"{path}: cannot be read: {e.strerror}") from None
    if len(content) > MOST:
        raise InputError(f"{path}: longer than {MOST:,} bytes, which no configuration is")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise InputError(f"{path}: not UTF-8 text ({e.reason} at byte {e.start})") from None


def validate(
    tables: Tables, *, text: str = "", origin: str = "config", overrides: Sequence[str] = ()
) -> Config:
    """A Config from parsed tables. All mistakes are in one InputError, a line for each."""
    problems: list[Problem] = []
    config = None
    try:
        config = Config.model_validate(_tuples(tables))
    except ValidationError as e:
        problems += _group(e.errors())
    except RecursionError:
        raise InputError(f"{origin}: tables within tables, deeper than any configuration") from None
    if config is not None:
        problems += _method_problems(config.method) or misfits(config)
    if config is None or problems:
        first, source = problems[:MOST_SHOWN], Source(origin, text, tuple(overrides))
        lines = [source.placed(why, key) for key, why in first]
        if len(problems) > MOST_SHOWN:
            lines.append(f"{origin}: and {len(problems) - MOST_SHOWN} more")
        raise InputError("\n".join(lines))
    return config


def _drop_foreign_options(tables: Tables, given: Sequence[str]) -> tuple[str, ...]:
    """After `-c method.name=...`, drop the file's options that the new method does not have.

    So one file serves to compare methods. Options given by `-c` stay, and are checked. Returns the
    names of the dropped options. The file of a FILE.py:NAME is run, to learn its options; raises
    InputError if that gives no method.
    """
    name, section = _name_in(tables, "method"), tables.get("method")
    if not isinstance(section, dict) or "method" in given:
        return ()
    typed = {"name", *(key.removeprefix("method.") for key in given)}
    if not section.keys() - typed:
        return ()
    if is_python(str(name)):
        options = recipes.made_by(load_python("method.name", str(name)).value).options.keys()
        automatic = {"ess", "lam"} <= options
    elif recipes.is_method(name):
        recipe = recipes.fitting(str(name), section)
        options, automatic = recipe.options.keys(), recipe.traits.auto_ess
    else:
        return ()
    dropped = [
        key
        for key in section
        if key not in typed
        and (key not in options or (key == "ess" and section[key] == "auto" and not automatic))
    ]
    for key in dropped:
        del section[key]
    return tuple(dropped)


def apply_overrides(tables: Tables, overrides: Sequence[str]) -> None:
    """`apply_override` for each, in order.

    Also raises InputError if a key of the file would get another meaning by a changed name.
    """
    written = {k: dict(v) if isinstance(v, dict) else v for k, v in tables.items()}
    for override in overrides:
        apply_override(tables, override)
    _check_carried(written, tables, keys_set(tuple(overrides)))


def apply_override(tables: Tables, override: str) -> None:
    """Set one `section.key=value` in `tables`.

    A value that is no TOML is taken as text. An empty value removes the key. Raises InputError for
    an override of another form.
    """
    path, equals, value = override.partition("=")
    keys = [k.strip() for k in path.split(".")]
    if not equals or not all(keys):
        raise InputError(
            f'-c "{override}": write it as section.key=value, as in training.rounds=50'
        )
    try:
        parsed = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    except (RecursionError, ValueError) as e:
        raise InputError(f"-c {shown(path)}: the value cannot be read: {e}") from None
    table = tables
    for k in keys[:-1]:
        inner = table.setdefault(k, {})
        if not isinstance(inner, dict):
            raise InputError(f'-c "{override}": "{k}" is a value, not a section')
        table = inner
    if value.strip():
        table[keys[-1]] = parsed
    else:
        table.pop(keys[-1], None)


def _tuples(value: Any) -> Any:
    """The value with lists as tuples, since the frozen schema has no lists."""
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _group(errors: Sequence[ErrorDetails], schema: type[BaseModel] = Config) -> list[Problem]:
    """One problem per key.

    pydantic reports a value that fits no member of a union once for each member: these messages
    are joined by "or".
    """
    messages: dict[tuple[str, ...], list[str]] = {}
    paths = [_path(error) for error in errors]
    listed: set[tuple[str, ...]] = set()
    for error in errors:
        path_of_error = _path(error)
        # If a list has a wrong element, say only that; leave out that a list is none of the names.
        if isinstance(error["input"], tuple) and any(
            len(path) > len(path_of_error) and path[: len(path_of_error)] == path_of_error
            for path in paths
        ):
            continue
        messages.setdefault(_path(error), []).append(_message(error, schema, listed))
    return [(key, "; or ".join(dict.fromkeys(texts))) for key, texts in messages.items()]


def _path(error: ErrorDetails) -> tuple[str, ...]:
    """The key that a pydantic error is about, without pydantic's names of union members."""
    members = ("literal[", "tuple[", "dict[")
    named = [str(p) for p in error["loc"] if not str(p).startswith(members)]
    return tuple(p for p in named if p not in ("str", "int"))


def _message(error: ErrorDetails, schema: type[BaseModel], listed: set[tuple[str, ...]]) -> str:
    """The message for an error.

    listed: sections whose allowed keys were listed already; several unknown keys list them once.
    """
    given, kind = error["input"], error["type"]
    key = ".".join(_path(error))
    if kind == "extra_forbidden":
        *section, name = _path(error)
        allowed = _allowed_keys(tuple(section), schema)
        names = "" if tuple(section) in listed else f"; allowed: {', '.join(allowed)}"
        listed.add(tuple(section))
        return f'unknown key "{shown(key)}"{names}.{nearest(name, allowed)}'
    if kind == "value_error":
        message = str(error["msg"]).removeprefix("Value error, ")
        return message if not key or message.startswith(f"{key}.") else f"{key}: {message}"
    if kind == "literal_error":
        return _literal(key, error)
    if kind == "model_type":
        return f"{key} = {_shown(given)}: must be a section, written [{key}]"
    return f"{key} = {_shown(given)}: {_rule(error)}"


def _literal(key: str, error: ErrorDetails) -> str:
    expected = str(error["ctx"]["expected"]).replace(" or ", ",")
    names = [name.strip(" '") for name in expected.split(",")]
    given = error["input"]
    hint = nearest(str(given), names)
    if isinstance(given, bool) and str(given).lower() in names:
        text = f'{key.rpartition(".")[2]} = "{str(given).lower()}"'
        hint = f" It is a text, in quotes: {text}; after -c, '{key}=\"{str(given).lower()}\"'."
    return f"{key} = {_shown(given)}: allowed are {', '.join(names)}.{hint}"


_RULES = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "may hold letters, digits, spaces and . _ + = - only, "
    "and not only dots and spaces",
}


def _rule(error: ErrorDetails) -> str:
    rule = _RULES.get(error["type"])
    if rule is None:
        return str(error["msg"][0].lower() + error["msg"][1:])
    return rule.format(**error.get("ctx", {}))


def _shown(value: Any) -> str:
    """A value as TOML writes it, cut to 60 characters."""
    text = _toml(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _allowed_keys(section: Iterable[str], model: type[BaseModel]) -> list[str]:
    for name in section:
        field = model.model_fields.get(name)
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return sorted(model.model_fields)


def _method_problems(method: Method) -> list[Problem]:
    """Problems of [method]: with the recipe's name, and its options' names and types."""
    if method.name == PYTHON or is_python(method.name):
        return []  # checked when it is loaded: merely reading a configuration runs no Python
    try:
        recipe = recipes.recipe(method.name, method.options)
    except InputError as e:
        key = "weights" if recipes.is_method(method.name) else "name"
        return [(("method", key), str(e).replace("out weights", "out method.weights"))]
    problems: list[Problem] = []
    for key, value in method.options.items():
        option = recipe.options.get(key)
        if option is None:
            allowed = ["name", *recipe.options]
            text = f'unknown key "method.{shown(key)}" for {method.name}; '
            text += f"allowed: {', '.join(allowed)}.{nearest(key, [*allowed, 'weights'])}"
            problems.append((("method", key), text + recipes.under.hint(key, recipe.traits)))
        elif not (recipe.traits.auto_ess and key == "ess" and value == "auto"):
            problems += _type_problems(key, value, option.annotation)
    return problems


def _type_problems(key: str, value: Any, annotation: Any) -> list[Problem]:
    adapter = TypeAdapter[Any](annotation, config=ConfigDict(strict=True))
    try:
        adapter.validate_python(value)
    except ValidationError as e:
        errors = e.errors()
        named = [error for error in errors if error["type"] == "literal_error"]
        other = [e for e in errors if e["type"] not in ("literal_error", "none_required")]
        if not named:
            return [(("method", key), f"method.{key} = {_shown(value)}: {_rule(errors[0])}")]
        if not other:
            return [(("method", key), _literal(f"method.{key}", named[0]))]
        either = f"{_rule(other[0])} or {named[0]['ctx']['expected']}"
        return [(("method", key), f"method.{key} = {_shown(value)}: {either}")]
    return []


def dumps(config: Config, folder: Path | None = None) -> str:
    """The configuration as TOML with every key written out; loading it gives an equal Config.

    folder: the run's; if given, paths of files are written relative to it.
    """
    without = _unused(config.data, config.shift)
    tables: Mapping[str, Any] = config.model_dump(exclude_none=True, exclude=without)
    if folder is not None:
        tables = with_paths(tables, lambda path: relative(path, folder))
    lines = [f"{k} = {_toml(v)}" for k, v in tables.items() if not isinstance(v, dict)]
    for name, table in tables.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]", *(f"{k} = {_toml(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def _unused(data: Data, shift: Split) -> set[str]:
    """Tables that would say nothing: [shift], if the user's own data come with their clients."""
    elsewhere = data.source not in (None, PYTHON)
    implied = shift == Split() or data.target == "clients"
    return {"shift"} if elsewhere and implied else set()


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return str(value) if isinstance(value, datetime.date | datetime.time) else repr(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _name_in(tables: Mapping[str, Any], section: str) -> Any:
    """The name in a section of a parsed file, or the default if it has none."""
    table, key = tables.get(section), NAMES[section]
    default = getattr(getattr(Config(), section), key)
    return table.get(key, default) if isinstance(table, dict) else default


def _check_carried(
    written: Mapping[str, Any], tables: Mapping[str, Any], given: Sequence[str]
) -> None:
    """Raise InputError if -c changes a section's name and so the meaning of an option of the file.

    written: the file's tables; tables: those after -c; given: the keys that -c has set.
    """
    problems = [
        problem
        for section in NAMES
        if section not in given
        for problem in _changed_meanings(section, written, tables, given)
    ]
    if problems:
        raise InputError("\n".join(problems))


def _changed_meanings(
    section: str, written: Mapping[str, Any], tables: Mapping[str, Any], given: Sequence[str]
) -> Iterator[str]:
    old, new = _name_in(written, section), _name_in(tables, section)
    options = written.get(section)
    for option, value in options.items() if isinstance(options, dict) and old != new else ():
        key = f"{section}.{option}"
        before, after = _meaning(key, old), _meaning(key, new)
        if key not in given and before and after and before != after:
            yield (
                f"-c {section}.{NAMES[section]}={new}: {key} = {shown(str(value))} is {before} in "
                f"{old}, and {after} in {new}; set it as well with -c {key}=VALUE, or leave it out "
                f"with -c {key}="
            )


def _meaning(key: str, name: Any) -> str | None:
    """What an option means under a name; None if it means the same everywhere, or is none of it."""
    section, _, option = key.partition(".")
    if section == "method":
        return recipes.recipe(name).meanings.get(option) if recipes.is_method(name) else None
    meanings = OTHERWISE.get(key, {})
    return next((what for what, names in meanings.items() if name in names), None)
