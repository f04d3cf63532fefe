"""CONTRIBUTING.md's rules of code, each checked in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

from support.sources import FILES, PACKAGE, TESTS, names_given, nodes_of, place_of

Names = dict[str, set[str]]


def by_file(names: Callable[[str], set[str]]) -> Names:
    """The names that `names` reports of each file of the package, where there are any."""
    seen = {place_of(path): names(path.read_text()) for path in FILES}
    return {place: some for place, some in seen.items() if some}


def calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    """(dotted name, call) for what is called by name."""
    for node in nodes_of(source):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            yield ast.unparse(node.func), node


def test_nothing_is_global() -> None:
    for path in FILES:
        assert not any(isinstance(node, ast.Global) for node in nodes_of(path.read_text())), path


def test_no_pickle() -> None:
    """Bytes from elsewhere never reach pickle (see also test_no_pickle.py).

    One file has torch's restricted reader, which the other test sees to.
    """
    for path in FILES:
        if path.name == "safe_pickle.py":
            continue
        banned = {"pickle.load", "pickle.loads", "torch.load"}
        banned -= {"torch.load"} if path.match("models/weight_file.py") else set()
        for node in nodes_of(path.read_text()):
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) not in banned


# What draws from a global generator unless it is given one; `tensor.normal_()` and its kin, too.
DRAWS = re.compile(
    r"torch\.(rand|randn|randint|randperm|normal|bernoulli|multinomial|poisson)(_like)?$"
    r"|(torch\.)?nn\.init\.\w*(normal|uniform|orthogonal|sparse)\w*$"
    r"|(np|numpy)\.random\.\w+$|random\.\w+$|torch\.(manual_seed|seed)$"
    r"|.*\.(normal|uniform|random|bernoulli|exponential|geometric|cauchy|log_normal)_$"
)
MAKES = {"torch.Generator", "np.random.default_rng", "np.random.Generator", "np.random.PCG64"}


def global_draws(source: str) -> set[str]:
    """Calls that draw from, or seed, a generator of the whole process."""
    return {
        name
        for name, call in calls(source)
        if DRAWS.match(name) and name not in MAKES
        if not any(keyword.arg == "generator" for keyword in call.keywords)
    }


def test_random_numbers_come_from_generators_of_the_package() -> None:
    """Exceptions: the first weights of networks, and what puts the global generators back.

    First weights are drawn as torch's layers draw theirs, from the generator that `build` seeds.
    """
    states = {"np.random.get_state", "np.random.set_state", "random.getstate", "random.setstate"}
    assert by_file(global_draws) == {
        "models/etf.py": {"torch.randn"},
        "models/resnet.py": {"nn.init.kaiming_normal_"},
        "models/resnet_routed.py": {"nn.init.kaiming_normal_"},
        "randomness.py": states | {"np.random.seed", "random.seed"},
    }
    for odd in ("torch.randn(3)", "np.random.rand()", "x.normal_()", "torch.manual_seed(1)"):
        assert global_draws(odd)
    assert not global_draws("torch.randperm(3, generator=g)")


def test_generators_are_made_in_few_places() -> None:
    """`seeds` makes generators from keys.

    Others: a fixed seed of a trial, states that are read or copied, the seed of a paper's split.
    """
    assert by_file(lambda source: {name for name, _ in calls(source)} & MAKES) == {
        "seeds.py": {"torch.Generator", "np.random.Generator", "np.random.PCG64"},
        "evaluation/corrected.py": {"torch.Generator"},
        "engine/processes/pipe.py": {"torch.Generator"},
        "client/local.py": {"torch.Generator"},
        "papers/datasets/fedpals_clients.py": {"np.random.default_rng"},
    }


def mutable(source: str) -> set[str]:
    """The dataclasses that are not frozen."""
    return {
        node.name
        for node in nodes_of(source)
        if isinstance(node, ast.ClassDef)
        for decorator in map(ast.unparse, node.decorator_list)
        if re.match(r"(dataclasses\.)?dataclass\b", decorator) and "frozen=True" not in decorator
    }


def test_values_are_frozen() -> None:
    """These change: logs, processes, sums under way, what is made when it is first asked for."""
    assert by_file(mutable) == {
        "client/dense/nets.py": {"FirstLayer"},
        "client/plans.py": {"PlansOfGroup", "PlansOfClient"},
        "deploy/joining.py": {"_Membership"},
        "deploy/monitoring.py": {"Presence"},
        "deploy/watching.py": {"Watch"},
        "engine/device.py": {"_Moved"},
        "engine/processes/pool.py": {"_Worker", "Team"},
        "engine/choosing/loop_or_workers.py": {"Quicker"},
        "engine/stacking/stacked.py": {"Stacked"},
        "engine/storage/client_states.py": {"Draft"},
        "engine/sums/running.py": {"RunningSums"},
        "engine/sums/summing.py": {"_Arrivals"},
        "experiments/machines/deployed_engine.py": {"News", "Deployed"},
        "experiments/engines.py": {"InProcess"},
        "experiments/folder/progress.py": {"Progress"},
        "experiments/sites/asking.py": {"Sites"},
        "experiments/sites/gathering.py": {"RemoteScores"},
        "experiments/config/toml_lines.py": {"_Reader"},
        "flower/local.py": {"Traffic"},
        "flower/simulation.py": {"_Runtime"},
        "record/events.py": {"Course", "Events"},
        "sweeps/starting.py": {"Forks"},
    }
    assert mutable("@dataclass\nclass A: pass") == {"A"}
    assert not mutable("@dataclass(eq=False, frozen=True)\nclass A: pass")


# Documented, in spite of their names.
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}
# Other packages' private names, and methods of one class that it calls on another of its kind.
PRIVATE = {
    "cli/loading.py": {"_exit"},
    "deploy/forking.py": {"_exit"},
    "deploy/inside.py": {"_exit"},
    "datasets/fetch.py": {"_Hash"},
    "deploy/uploads.py": {"_lock_object_push_sessions", "_object_push_sessions"},
    "tasks/tensors.py": {"_like", "_padded", "_joined"},
}


def private_names(source: str) -> set[str]:
    """Private names that a module takes from something else; not an object's own `self._name`.

    With torch's operators below `torch.ops`, which are not documented either.
    """
    names = set[str]()
    for node in nodes_of(source):
        if isinstance(node, ast.Attribute):
            if ast.unparse(node.value) not in ("self", "cls"):
                names.add("ops" if ast.unparse(node) == "torch.ops" else node.attr)
        elif isinstance(node, ast.ImportFrom):
            names |= {part for part in (node.module or "").split(".") if node.module}
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {part for alias in node.names for part in alias.name.split(".")}
    return {n for n in names if n == "ops" or re.match("_[a-zA-Z]", n)} - OF_NAMED_TUPLES


def test_private_names_of_torch_stand_in_one_file() -> None:
    """Any private name counts, so that torch's new ones are seen, too."""
    seen = by_file(private_names)
    assert seen.pop("kernels/torch_private.py") >= {"ops", "_C", "_version", "_parameters"}
    assert seen == PRIVATE
    assert private_names("v._version") == {"_version"}
    assert private_names("from torch import _C") == {"_C"}
    assert private_names("from torch._dynamo import reset") == {"_dynamo"}
    assert private_names("torch.ops.aten.relu(x)") == {"ops"}
    assert not private_names("self._version, plan._replace(steps=1), plan.__class__")


def test_public_functions_have_docstrings() -> None:
    for path in FILES:
        module = nodes_of(path.read_text())[0]
        assert isinstance(module, ast.Module)
        for node in module.body:
            public = not getattr(node, "name", "_").startswith("_")
            if public and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                assert ast.get_docstring(node), f"{path.name}: {node.name}"


def says_nothing(source: str) -> bool:
    """Whether a module has code, and no docstring in its first line."""
    return bool(source.strip()) and not re.match(r'"""[^"\n]', source)


def test_the_first_line_of_a_file_says_what_it_holds() -> None:
    assert [place_of(path) for path in FILES if says_nothing(path.read_text())] == []
    assert says_nothing("import re\n")
    assert says_nothing('"""\nWhat it holds."""\n')
    assert not says_nothing("")


def takers_of_config(source: str) -> list[str]:
    """The functions that take the whole configuration of an experiment, or may take it."""
    return [
        node.name
        for node in nodes_of(source)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if any(
            one.annotation and re.fullmatch(r"Config( \| None)?", ast.unparse(one.annotation))
            for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        )
    ]


# To be lowered where the number falls.
TAKERS = 35


def test_functions_take_a_section_of_the_configuration() -> None:
    """The number may only fall: a function takes the section that it needs."""
    takers = [name for path in FILES for name in takers_of_config(path.read_text())]
    assert len(takers) <= TAKERS, takers
    assert takers_of_config("def f(a: Config, b: Config | None): pass") == ["f"]
    assert not takers_of_config("def f(data: Data) -> Config: pass")


def too_long(path: Path, source: str) -> list[str]:
    """The file, where it has more than 450 lines, and its functions of more than 40."""
    lines = len(source.splitlines())
    long = [f"{path.name} has {lines} lines"] if lines > 450 else []
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docs = ast.get_docstring(node, clean=False) or ""
            length = (node.end_lineno or 0) - node.lineno + 1 - len(docs.splitlines())
            if length > 40:
                long.append(f"{path.name}: {node.name} has {length} lines")
    return long


def test_files_and_functions_are_short() -> None:
    assert [long for path in FILES for long in too_long(path, path.read_text())] == []


def test_long_files_and_functions_are_seen() -> None:
    body = "def f():\n" + "    pass\n" * 40
    for source in (body, f"async {body}"):
        assert too_long(PACKAGE / "a.py", source) == ["a.py: f has 41 lines"]
    assert too_long(PACKAGE / "a.py", "x = 1\n" * 451) == ["a.py has 451 lines"]


# Words of stories; a name says what the value is, or what the function does.
OF_STORIES = {"found", "told", "held", "own", "known", "whoever", "nobody", "said"}
# Names that users write. Only to shrink.
STORIES_LEFT = {
    "datasets/registry.py": {"found", "known"},
    "flower/strategy.py": {"own"},
}


def test_names_say_what_things_are() -> None:
    used = by_file(lambda source: names_given(source) & OF_STORIES)
    assert used == STORIES_LEFT
    source = "class A:\n    own: int\ndef known(told):\n    a.held = said = [x for found in y]"
    assert names_given(source) & OF_STORIES == OF_STORIES - {"whoever", "nobody"}


@pytest.mark.slow
def test_names_in_tests_and_benchmarks_say_what_things_are() -> None:
    """Slow because it parses all of them."""
    benchmarks = sorted(PACKAGE.parent.joinpath("benchmarks").rglob("*.py"))
    used = {path: names_given(path.read_text()) & OF_STORIES for path in (*TESTS, *benchmarks)}
    assert len(benchmarks) > 50
    assert {path: names for path, names in used.items() if names} == {}


def classes(source: str) -> dict[str, set[str]]:
    """By class, those that it inherits from; of other packages as `package.Name`."""
    nodes = nodes_of(source)
    foreign = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("fedshift")
        for alias in node.names
    }
    bases = {
        node.name: {ast.unparse(base).split("[")[0] for base in node.bases}  # no type arguments
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    return {name: {foreign.get(one, one) for one in of} for name, of in bases.items()}


def concrete_bases(sources: Collection[str]) -> set[tuple[str, str]]:
    """(class, base) where the base is concrete; errors and sections of a configuration may be."""
    bases_of = {name: bases for source in sources for name, bases in classes(source).items()}
    return {
        (name, base)
        for name, bases in bases_of.items()
        for base in bases & bases_of.keys()
        if not bases_of[base] & {"abc.ABC", "typing.Protocol"}
        and not base.endswith(("Error", "Section"))
    }


def test_no_class_inherits_from_a_concrete_one() -> None:
    assert concrete_bases([path.read_text() for path in FILES]) == set()
    assert concrete_bases(["class A: pass", "class B(A): pass"]) == {("B", "A")}


def as_text(node: ast.AST) -> str:
    """A text as it is written, with a word in place of each value; empty for what is none."""
    if isinstance(node, ast.JoinedStr):
        parts = (v.value if isinstance(v, ast.Constant) else "value" for v in node.values)
        return "".join(map(str, parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return "".join(as_text(side) or "value" for side in (node.left, node.right))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


MOST_WORDS = 30


def long_messages(source: str) -> list[str]:
    """The sentences of errors' messages that have too many words."""
    texts = [
        as_text(given)
        for name, call in calls(source)
        if name.endswith("Error")
        for given in (*call.args, *(keyword.value for keyword in call.keywords))
    ]
    sentences = [one for text in texts for one in re.split(r"(?<=[.!?]) (?=\S)|\n", text)]
    return [one for one in sentences if len(one.split()) > MOST_WORDS]


def test_messages_of_errors_are_short() -> None:
    """In each of their sentences. Control: one word more, in an f-string and in a sum."""
    assert by_file(lambda source: set(long_messages(source))) == {}
    for odd in (f"f'{{x}} {'a ' * 30}'", f"x + '{' a' * 30}'", f"'{'a ' * 31}'"):
        assert long_messages(f"raise errors.InputError({odd})")
    assert not long_messages(f"raise InputError('{'a ' * 29}a. {'b ' * 30}')")
