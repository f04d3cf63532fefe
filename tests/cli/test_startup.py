"""Commands that must start at once load no large library."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LARGE = ("torch", "numpy", "scipy", "pandas", "pydantic", "flwr")
SCRIPT = """
import json, sys
sys.argv = ["fedshift", *sys.argv[1:]]
if len(sys.argv) > 1:
    from fedshift.cli import main
    try:
        main()
    except SystemExit as e:
        assert not e.code, e.code
else:
    import fedshift
print()
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def loaded(*arguments: str) -> set[str]:
    """The packages loaded by a command, or by importing fedshift alone."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.few(1)
@pytest.mark.parametrize("arguments", [(), ("--help",), ("run", "--help")], ids=" ".join)
def test_nothing_large_is_loaded(arguments: tuple[str, ...]) -> None:
    modules = loaded(*arguments)
    assert "fedshift" in modules
    assert not modules & set(LARGE)


@pytest.mark.slow
def test_the_check_of_loaded_packages_can_fail() -> None:
    assert loaded("datasets", "--format", "json") & set(LARGE)
