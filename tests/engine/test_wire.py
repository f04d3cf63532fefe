"""Trees through pipes between processes: as they are, whatever their number, or an error."""

from __future__ import annotations

import threading
from multiprocessing import Pipe

import pytest
import torch

from fedshift.engine.processes import pipe as module
from fedshift.engine.processes.pipe import ALIGN, receive, send, shared
from fedshift.tree import Parts


def there_and_back(trees: list[Parts]) -> list[Parts]:
    """Through a pipe that holds less than is sent: one writes while the other reads."""
    ours, theirs = Pipe()

    def write() -> None:
        with ours:  # closed even where it fails, or the reader would wait for ever
            send(ours, "about", trees)

    writer = threading.Thread(target=write)
    writer.start()
    about, found = receive(theirs)
    writer.join()
    assert about == "about"
    return found


def check_same(trees: list[Parts], found: list[Parts]) -> None:
    assert len(found) == len(trees)
    for tree, back in zip(trees, found, strict=True):
        assert [(p, list(leaves)) for p, leaves in tree.items()] == [
            (p, list(leaves)) for p, leaves in back.items()
        ]
        for part, leaves in tree.items():
            for name, v in leaves.items():
                assert v.dtype == back[part][name].dtype
                assert torch.equal(v, back[part][name])
                assert back[part][name].data_ptr() % ALIGN == 0 or not v.numel()


def test_trees_travel_as_they_are() -> None:
    """Runs of equal forms, others between them, what is empty and what has no dimension."""
    one: Parts = {"a": {"w": torch.randn(3, 5), "b": torch.tensor(2.5)}, "empty": {}}
    two: Parts = {"a": {"w": torch.randn(3, 5), "b": torch.tensor(-1.0)}, "empty": {}}
    odd: Parts = {
        "c": {"y": torch.arange(7), "m": torch.tensor([True, False]), "none": torch.zeros(0, 4)}
    }
    turned: Parts = {"t": {"v": torch.randn(4, 6).t(), "h": torch.randn(5).bfloat16()}}
    trees = [one, two, odd, {}, turned, one]
    check_same(trees, there_and_back(trees))
    assert there_and_back([]) == []


@pytest.mark.parametrize("little", [0, module.LITTLE, 1 << 30])
def test_copied_together_or_sent_from_where_they_lie(
    little: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LITTLE", little)
    trees = [
        {"a": {"w": torch.randn(3, 5).t(), "h": torch.randn(i + 1, 2).bfloat16()}, "b": {}}
        for i in (0, 0, 1, 1, 1, 0)
    ]
    trees += [{"c": {"none": torch.zeros(0, 4), "m": torch.tensor([i > 1])}} for i in range(4)]
    check_same(trees, there_and_back(trees))


def test_what_little_trees_have_in_common_is_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories of gradients and what is empty do not matter; odd types go one by one."""
    pieces: list[int] = []
    whole = module._write
    monkeypatch.setattr(
        module,
        "_write",
        lambda at, views, end: (pieces.append(len(views) - 1), whole(at, views, end)),
    )
    plain: list[Parts] = [
        {"a": {"v": torch.randn(3).requires_grad_(), "n": torch.zeros(0, 2)}} for _ in range(5)
    ]
    check_same(plain, there_and_back(plain))
    nothing: list[Parts] = [{"a": {"n": torch.zeros(0)}}] * 3
    check_same(nothing, there_and_back(nothing))
    check_same(
        [{"a": {"v": torch.tensor([True])}}] * 5,
        there_and_back([{"a": {"v": torch.tensor([True])}}] * 5),
    )
    assert pieces[:2] == [1, 0]
    assert pieces[2] > 5


def test_names_in_another_order_stay_so() -> None:
    trees = [{"a": {k: torch.tensor(ord(k)) for k in names}} for names in ("xy", "yx", "xy", "xy")]
    check_same(trees, there_and_back(trees))


def test_more_pieces_than_a_call_takes_and_more_bytes_than_a_pipe_holds() -> None:
    many: Parts = {"m": {f"{i}": torch.full((3,), float(i)) for i in range(3 * module.MANY)}}
    large: Parts = {"l": {"v": torch.arange(1 << 20)}}
    check_same([many, large, many], there_and_back([many, large, many]))


def test_what_fits_lies_in_memory_that_both_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next overwrites it, and what was received stays; what is larger takes the pipe."""
    room, (ours, theirs) = shared()[: 4 * ALIGN], Pipe()
    piped, whole = list[int](), module._write

    def words_alone(at: int, views: list[memoryview], end: float | None) -> None:
        piped.extend(map(len, views[1:]))
        whole(at, views[:1], end)

    monkeypatch.setattr(module, "_write", words_alone)
    one, two = ([{"a": {"v": torch.full((32,), i)}}] for i in (1, 2))
    send(ours, 1, one, room)
    found = receive(theirs, room)
    send(theirs, 2, two, room)
    assert torch.equal(torch.frombuffer(room, dtype=torch.int64), torch.full((32,), 2))
    assert found[0] == 1
    check_same(one, found[1])
    check_same(two, receive(ours, room)[1])
    assert not piped
    send(ours, 3, [*one, {"b": {"c": torch.ones(1)}}], room)
    assert sum(piped) == 5 * ALIGN


def test_writes_that_are_cut_short_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = module.os.writev
    monkeypatch.setattr(
        module.os, "writev", lambda where, views: whole(where, [views[0][: len(views[0]) // 2 + 1]])
    )
    trees: list[Parts] = [{"a": {"v": torch.arange(100), "w": torch.randn(7)}}]
    check_same(trees, there_and_back(trees))


def test_an_end_in_the_middle_is_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    (ours, theirs), whole = Pipe(), module._write
    monkeypatch.setattr(module, "_write", lambda at, views, end: whole(at, views[:1], end))
    send(ours, None, [{"a": {"v": torch.arange(100)}}])
    ours.close()
    with pytest.raises(EOFError):
        receive(theirs)
