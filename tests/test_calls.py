"""Calls with wrong arguments: the message shows how to write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedshift as fs
from fedshift.calls import called_as
from support.custom_tasks import Net, hospitals

ANY: Any = fs
X, Y, SITE = np.zeros((4, 2), np.float32), [0, 1, 0, 1], ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: ANY.method("fedprox", 0.5), "fs.method takes the method by place.*as mu=0.5$"),
        (lambda: ANY.method("fedavg", 3), "leave out the others$"),
        (lambda: ANY.method(), "method is None; give a name"),
        (lambda: ANY.fit(1, Net, "fedavg"), "fs.fit takes task, net by place.*method='fedavg'$"),
        (lambda: ANY.fit(net=Net), 'fs.fit needs task as well, as in fs.fit.task, net, method="'),
        (lambda: ANY.compare(1, Net), "fs.compare needs methods as well"),
        (lambda: ANY.compare(1, Net, ["fedavg"], 3), "by name, as seeds=3$"),
        (lambda: ANY.load("a", Net), r"by name, as net=\.\.\.$"),
        (lambda: ANY.load("a", nets=Net), 'no argument "nets". Did you mean "net"'),
        (lambda: ANY.Task(X, Y), r"a task is made by fs\.Task\.from_arrays"),
        (lambda: ANY.Task(), r"a task is made by fs\.Task\.from_arrays"),
        (lambda: ANY.Task.from_arrays(X, Y, SITE, "a"), r"as client=\.\.\., target='a'$"),
        (lambda: ANY.Task.from_arrays(X, Y, target="a"), "needs client as well, as in fs.Task"),
        (lambda: ANY.Task.from_csv("a.csv", "b", "c", "d"), "client='b', label='c', target='d'$"),
        (lambda: ANY.Task.from_csv("a.csv"), "needs client and label and target as well"),
        (lambda: ANY.Task.from_frame({}, "b"), "as client='b'$"),
        (lambda: ANY.Task.from_parquet("a", "b"), "as client='b'$"),
        (lambda: ANY.Task.from_folder("a", "b"), "as target='b'$"),
        (lambda: ANY.Task.from_datasets({}, "b"), "as target='b'$"),
        (lambda: ANY.Task.from_partition({}, [], "b"), "as target='b'$"),
        (lambda: ANY.Task.from_split(X, Y, None, 3), "as clients=3$"),
        (lambda: ANY.Task.from_name("chem97", "pooled"), "as target='pooled'$"),
        (lambda: ANY.Task.from_name(), "needs name and target as well"),
    ],
)
def test_a_call_that_does_not_fit_says_how_to_write_it(call: Any, match: str) -> None:
    with pytest.raises(fs.InputError, match=match) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_calls_that_fit_are_as_before() -> None:
    """Also with keyword arguments; a TypeError raised inside the function stays one."""
    by_name = fs.Task.from_arrays(x=X, y=Y, client=SITE, target="a")
    assert (
        by_name.build().digest == fs.Task.from_arrays(X, Y, client=SITE, target="a").build().digest
    )
    assert "Raises InputError" in str(fs.Task.from_arrays.__doc__)

    @called_as("odd(1)")
    def odd(x: Any) -> Any:
        return x + "a"

    with pytest.raises(TypeError, match="unsupported operand"):
        odd(1)


def test_results_refuse_such_calls(tmp_path: Any) -> None:
    result: Any = fs.fit(hospitals(n=100), Net, rounds=1, steps=1, progress=False)
    with pytest.raises(fs.InputError, match=r"result.predict takes rows by place.*client='south'$"):
        result.predict(X, "south")
    with pytest.raises(fs.InputError, match=r"result.export takes path by place.*client='south'$"):
        result.export(tmp_path / "a.pt", "south")
