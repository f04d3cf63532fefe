"""Rules of code: no globals, no pickle, keyed random numbers, docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from support.sources import FILES, nodes_of, place_of

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
        banned -= {"torch.load"} if path.match("models/pretrained.py") else set()
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
