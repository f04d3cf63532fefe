"""Models and messages as dictionaries of tensors, at most two levels deep.

`Params` is one model or anything shaped like one; `Parts` is a message, an update, a client's
state or the server's state: named parts of `Params`. The same two levels are a safetensors file
(`part/name`), a torch.func pytree and a Flower record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fedshift.arguments import called
from fedshift.errors import InputError

Params = dict[str, Tensor]
Parts = dict[str, Params]

# Columns that are summed at a time: few enough that their sums stay in the processor's cache, and
# many, since each is three calls per row. For 10 rows of 11.3 million, 2^14 took 1.9 times as long
# as this, and for 5 of 157 thousand likewise (of 2^12 to 2^20).
COLUMNS = 1 << 18
# Columns and rows of what is summed by a running sum: 200 numbers of 50 clients take 26 us so, and
# 126 row by row. Of more rows it would hold too many numbers at a time.
FEW, MANY = 256, range(32, 513)
# Bytes of memory that are not worth a copy of the part that is kept.
LITTLE = 1 << 12


def map_(f: Callable[..., Tensor], *trees: Params) -> Params:
    """f applied name by name; all trees must have the names of the first."""
    first = trees[0]
    for other in trees[1:]:
        if other.keys() != first.keys():
            odd = sorted(other.keys() ^ first.keys())
            raise InputError(f"models with different parameter names: {odd[:5]}")
    if len(trees) == 2:  # most calls, and several in each step of training
        second = trees[1]
        return {name: f(v, second[name]) for name, v in first.items()}
    return {name: f(*[tree[name] for tree in trees]) for name in first}


def add(a: Params, b: Params, scale: float | Tensor = 1.0) -> Params:
    """a + scale * b."""
    if isinstance(scale, float) and scale == 1.0:  # the same bits without a copy of b
        return map_(torch.add, a, b)
    return map_(lambda x, y: x + scale * y, a, b)


def sub(a: Params, b: Params) -> Params:
    """a - b."""
    return map_(torch.sub, a, b)


@torch.inference_mode(False)
def ordinary(a: Params) -> Params:
    """The same numbers in tensors that gradients can be taken of: copies of inference mode's."""
    return {k: v.clone() if v.is_inference() else v for k, v in a.items()}


def zeros(a: Params) -> Params:
    """Zeros of the shapes of a."""
    return map_(torch.zeros_like, a)


def sq_norm(a: Params) -> Tensor:
    """Sum of squares of all entries, a 0-d tensor; in name order, which files do not keep."""
    if not a:
        return torch.zeros(())
    # A fixed order, because rounding of a sum depends on it.
    return torch.stack([(a[name] * a[name]).sum() for name in sorted(a)]).sum()


def split(a: Params, prefixes: Iterable[str]) -> tuple[Params, Params]:
    """(entries whose name starts with one of the prefixes, the others)."""
    starts = tuple(prefixes)
    inside = {k: v for k, v in a.items() if k.startswith(starts)}
    return inside, {k: v for k, v in a.items() if k not in inside}


def stack(many: Sequence[Parts]) -> Parts:
    """Leaves [...] of C equal trees to leaves [C, ...]; any difference in names or shapes raises.

    Strict on purpose: padding a ragged leaf with zeros would change results without a sign.
    """
    first = many[0]
    # The quick comparison for all; where it fails, a slow one writes the message.
    for i, one in enumerate(many):
        if not same_parts(one, first):
            _check_stackable(first, one, i)
    return {
        part: {name: torch.stack([one[part][name] for one in many]) for name in first[part]}
        for part in first
    }


def same_parts(a: Parts, b: Parts) -> bool:
    """Whether two messages have the same parts, each of the same names, shapes and types."""
    if a.keys() != b.keys():
        return False
    for part, tree in a.items():
        other = b[part]
        if tree.keys() != other.keys():
            return False
        for name, v in tree.items():
            if v.shape != other[name].shape or v.dtype != other[name].dtype:
                return False
    return True


def _check_stackable(first: Parts, one: Parts, i: int) -> None:
    for part in first | one:
        ours, theirs = first.get(part), one.get(part)
        if ours is None or theirs is None or ours.keys() != theirs.keys():
            raise InputError(f'cannot stack: entry {i} differs from entry 0 in part "{part}"')
        for name in ours:
            if ours[name].shape != theirs[name].shape:
                raise InputError(
                    f'cannot stack: "{part}/{name}" is {tuple(theirs[name].shape)} in entry '
                    f"{i} and {tuple(ours[name].shape)} in entry 0"
                )


def weighted_sum(weights: Tensor, stacked: Params) -> Params:
    """sum_i w_i v_i over the first axis; weights [C], leaves [C, ...] -> [...].

    Accumulated in float64, or complex128, in the order of the rows and cast once. Rows of weight
    exactly 0 are left out before multiplying, because 0 * NaN is NaN.
    """
    # float64: the rounding of float32 terms would grow with the number of clients.
    rows = torch.nonzero(weights).flatten().tolist()
    w = weights.double()
    by = [w[i] for i in rows]

    def total(leaf: Tensor) -> Tensor:
        out = torch.zeros(leaf.shape[1:], dtype=sum_type(leaf.dtype), device=leaf.device)
        accumulate(out, [leaf[i] for i in rows], by)
        return out.to(leaf.dtype)

    return map_(total, stacked)


def sum_type(kind: torch.dtype) -> torch.dtype:
    """What tensors of this type are summed in."""
    return torch.complex128 if kind.is_complex else torch.float64


def accumulate(total: Tensor, rows: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """total [...] of `sum_type`, contiguous, += w_i v_i, row after row; rows [...], weights [].

    Row by row within a block of columns: the bits are those of whole rows added in turn, and the
    block's sums are read and written once for all rows.
    """
    if total.numel() <= FEW and len(rows) in MANY and total.device.type == "cpu":
        # A running sum adds in turn, too (not on a GPU), in one call where rows took three each.
        by = torch.stack(list(weights)).view(-1, *[1] * total.dim())
        products = torch.stack(list(rows)).to(total.dtype).mul_(by)
        total.copy_(torch.cat([total[None], products]).cumsum(0)[-1])
        return
    if total.numel() <= COLUMNS:
        product = torch.empty_like(total)
        for row, w in zip(rows, weights, strict=True):
            total.add_(product.copy_(row).mul_(w))
        return
    # Large tensors column by column: a product of the whole row would leave the cache.
    scratch = torch.empty(COLUMNS, dtype=total.dtype, device=total.device)
    cut = [torch.split(row.reshape(-1), COLUMNS) for row in rows]
    for i, sums in enumerate(torch.split(total.view(-1), COLUMNS)):
        product = scratch[: len(sums)]
        for blocks, w in zip(cut, weights, strict=True):
            sums.add_(product.copy_(blocks[i]).mul_(w))


def compact(v: Tensor) -> Tensor:
    """The tensor in memory of its own: a view would keep all that it came with alive."""
    return v if v.untyped_storage().nbytes() <= max(LITTLE, v.nbytes) else v.clone()


def flatten(parts: Parts) -> Params:
    """`{part: {name: v}}` to `{"part/name": v}`, the layout of a safetensors file."""
    try:
        return {f"{part}/{name}": v for part, tree in parts.items() for name, v in tree.items()}
    except AttributeError:
        raise InputError(
            f'flatten takes parts, as {{"params": params, "buffers": buffers}}, got {called(parts)}'
        ) from None


def size_in_bytes(parts: Parts) -> int:
    """Bytes of all tensors of a message or an update; names and headers are not counted."""
    return sum(v.numel() * v.element_size() for v in flatten(parts).values())


def unflatten(flat: Params, parts: Iterable[str] = ()) -> Parts:
    """The inverse of `flatten`; `parts` names those that must exist even when empty."""
    if isinstance(parts, str):
        raise InputError(f'the names of parts are the text "{parts}"; give ("{parts}",)')
    tree: Parts = {part: {} for part in parts}
    for path, v in flat.items():
        # The first slash: names of parts have none, names of tensors may.
        part, _, name = path.partition("/")
        tree.setdefault(part, {})[name] = v
    return tree
