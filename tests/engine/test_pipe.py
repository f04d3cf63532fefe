"""Objects sent through pipes between processes: tensors arrive unchanged, or an error is raised."""

from __future__ import annotations

import os
import threading
from multiprocessing import Pipe
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift.engine.processes import pipe as module
from fedshift.engine.processes.pipe import ALIGN, UnsentError, receive, send, share_memory
from fedshift.tree import Parts


def there_and_back(thing: Any, room: memoryview = module.NOWHERE) -> Any:
    """Send through a pipe smaller than the message: one side writes while the other reads."""
    ours, theirs = Pipe()

    def write() -> None:
        with ours:  # closed even where it fails, or the reader would wait for ever
            send(ours, thing, room)

    writer = threading.Thread(target=write)
    writer.start()
    back = receive(theirs, room)
    writer.join()
    return back


def check_same(trees: list[Parts], back: list[Parts]) -> None:
    assert len(back) == len(trees)
    for tree, other in zip(trees, back, strict=True):
        assert [(p, list(leaves)) for p, leaves in tree.items()] == [
            (p, list(leaves)) for p, leaves in other.items()
        ]
        for part, leaves in tree.items():
            for name, v in leaves.items():
                assert v.dtype == other[part][name].dtype
                assert torch.equal(v, other[part][name])
                assert other[part][name].data_ptr() % ALIGN == 0 or not v.numel()


KINDS = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64,
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("near", [False, True])
def test_trees_travel_as_they_are(near: bool) -> None:
    """Also empty, scalar and non-contiguous tensors, and odd memory orders."""
    odd: Parts = {
        "a": {"w": torch.randn(3, 5), "b": torch.tensor(2.5), "none": torch.zeros(0, 4)},
        "empty": {},
        "views": {"t": torch.randn(4, 6).t(), "same": torch.ones(1).expand(3, 2)},
        "kinds": {str(kind): torch.ones(3).to(kind) for kind in KINDS},
        "turned": {"conjugate": torch.randn(3, dtype=torch.complex64).conj()},
    }
    trees = [odd, {}, {"b": {"y": torch.arange(7)}, "a": {}}, {"a": {}, "b": {"x": torch.ones(2)}}]
    check_same(trees, there_and_back(trees, share_memory() if near else module.NOWHERE))
    assert there_and_back([]) == []


def test_one_tree_stays_one() -> None:
    """A tree that several jobs share is sent once and stays shared; other trees stay separate."""
    tree = {"w": torch.ones(3)}
    one, two, other = there_and_back([{"p": tree}, {"p": tree}, {"p": dict(tree)}])
    assert one["p"] is two["p"]
    assert one["p"] is not other["p"]


def test_generators_travel() -> None:
    """Each continues from its state; the control: their states differ."""
    sent = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    torch.rand(3, generator=sent[0])
    ahead = torch.ones(5)  # the states are not the first in the block
    _, *back = there_and_back([ahead, *sent])
    one, two = (torch.rand(4, generator=g) for g in sent)
    assert torch.equal(torch.rand(4, generator=back[0]), one)
    assert torch.equal(torch.rand(4, generator=back[1]), two)
    assert not torch.equal(one, two)


def test_modules_travel() -> None:
    """Parameters with `requires_grad`, tied parameters, and buffers of unsigned integers."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    net[0].bias.requires_grad_(False)
    net.register_buffer("seen", torch.tensor(7, dtype=torch.uint32))
    back = there_and_back(net)
    assert back[1].weight is back[0].weight
    assert [p.requires_grad for p in back.parameters()] == [
        p.requires_grad for p in net.parameters()
    ]
    assert all(torch.equal(v, back.state_dict()[k]) for k, v in net.state_dict().items())
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(there_and_back(sparse).to_dense(), torch.eye(3))


def test_what_cannot_be_pickled_leaves_the_pipe_as_it_was() -> None:
    ours, theirs = Pipe()
    with pytest.raises(UnsentError, match="lambda"):
        send(ours, [torch.ones(3), lambda: None])
    send(ours, "next")
    assert receive(theirs) == "next"


def test_more_pieces_than_a_call_takes_and_more_bytes_than_a_pipe_holds() -> None:
    many: Parts = {"m": {f"{i}": torch.full((3,), float(i)) for i in range(3 * module.MANY)}}
    large: Parts = {"l": {"v": torch.arange(1 << 20)}}
    check_same([many, large, many], there_and_back([many, large, many]))


def test_small_messages_use_shared_memory() -> None:
    """The next message overwrites it, but received tensors stay; larger messages take the pipe."""
    room, (ours, theirs) = share_memory()[: 4 * ALIGN], Pipe()
    one, two = (torch.full((32,), i) for i in (1, 2))

    def in_room() -> Tensor:
        return torch.frombuffer(room, dtype=torch.int64).clone()

    send(ours, one, room)
    assert torch.equal(in_room(), one)
    back = receive(theirs, room)
    send(theirs, two, room)
    assert torch.equal(in_room(), two)
    assert torch.equal(back, one)
    assert torch.equal(receive(ours, room), two)
    send(ours, [one, torch.ones(1)], room)
    assert torch.equal(in_room(), two)
    check_same([{"": dict(enumerate(receive(theirs, room)))}], [{"": {0: one, 1: torch.ones(1)}}])


def test_writes_that_are_cut_short_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = module.os.writev
    monkeypatch.setattr(
        module.os, "writev", lambda where, views: whole(where, [views[0][: len(views[0]) // 2 + 1]])
    )
    trees: list[Parts] = [{"a": {"v": torch.arange(100), "w": torch.randn(7)}}]
    check_same(trees, there_and_back(trees))


@pytest.mark.parametrize("bytes_left", [1, 500, 900])
def test_an_end_in_the_middle_is_an_end(bytes_left: int) -> None:
    (ours, theirs), (first, second) = Pipe(), Pipe()
    send(first, {"v": torch.arange(100)})
    first.close()
    os.write(ours.fileno(), os.read(second.fileno(), 4000)[:-bytes_left])
    ours.close()
    with pytest.raises(EOFError):
        receive(theirs)
