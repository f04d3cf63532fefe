"""Models and messages as dictionaries of tensors, at most two levels deep.

`Params` is one model or anything shaped like one. `Parts` is a message, an update, a client's state
or the server's state: named parts, each of them `Params`. These two levels map directly to a
safetensors file (`part/name`), a torch.func pytree and a Flower record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fedshift.arguments import called
from fedshift.errors import InputError

Params = dict[str, Tensor]
Parts = dict[str, Params]

# A view may keep so many bytes alive before `compact` copies it.
LITTLE = 1 << 12


def map_(f: Callable[..., Tensor], *trees: Params) -> Params:
    """Apply f to the tensors of each name. Raises InputError if trees have different names."""
    first = trees[0]
    for other in trees[1:]:
        if other.keys() != first.keys():
            odd = sorted(other.keys() ^ first.keys())
            raise InputError(f"models with different parameter names: {odd[:5]}")
    if len(trees) == 2:  # a faster way for most calls: each training step makes several
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
    """The same numbers in tensors that autograd accepts: those of inference mode are copied."""
    return {k: v.clone() if v.is_inference() else v for k, v in a.items()}


def zeros(a: Params) -> Params:
    """Zeros with the shapes of a."""
    return map_(torch.zeros_like, a)


def sq_norm(a: Params) -> Tensor:
    """Sum of squares of all entries, a 0-d tensor."""
    if not a:
        return torch.zeros(())
    # Sorted by name: rounding depends on the order, and files do not keep that of the dictionary.
    return torch.stack([(a[name] * a[name]).sum() for name in sorted(a)]).sum()


def split(a: Params, prefixes: Iterable[str]) -> tuple[Params, Params]:
    """(entries whose name starts with one of the prefixes, the others)."""
    starts = tuple(prefixes)
    inside = {k: v for k, v in a.items() if k.startswith(starts)}
    return inside, {k: v for k, v in a.items() if k not in inside}


def stack(many: Sequence[Parts]) -> Parts:
    """Stack C trees: leaves [...] become [C, ...]. Raises InputError if names or shapes differ.

    Strict on purpose: padding a shorter leaf with zeros would silently change results.
    """
    first = many[0]
    # A quick comparison for all; only if it fails does a slow one look for what to report.
    for i, one in enumerate(many):
        if not same_parts(one, first):
            _check_stackable(first, one, i)
    return {
        part: {name: torch.stack([one[part][name] for one in many]) for name in first[part]}
        for part in first
    }


def same_parts(a: Parts, b: Parts) -> bool:
    """Whether two messages have the same parts with the same names, shapes and types."""
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
    """Raise InputError, which names what differs, if two trees cannot be stacked."""
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

    Accumulated in float64 (or complex128) in the order of the rows, and cast once. Rows of weight
    exactly 0 are left out before multiplying, because 0 * NaN is NaN.
    """
    # float64, because the rounding error of a float32 sum grows with the number of clients.
    rows = torch.nonzero(weights).flatten().tolist()
    w = weights.double()
    by = [w[i] for i in rows]

    def total(leaf: Tensor) -> Tensor:
        out = torch.zeros(leaf.shape[1:], dtype=sum_type(leaf.dtype), device=leaf.device)
        accumulate(out, [leaf[i] for i in rows], by)
        return out.to(leaf.dtype)

    return map_(total, stacked)


def sum_type(kind: torch.dtype) -> torch.dtype:
    """The type in which tensors of this type are summed."""
    return torch.complex128 if kind.is_complex else torch.float64


def accumulate(total: Tensor, rows: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """total += w_i v_i in place, row after row; total [...] of `sum_type`, rows v_i [...],
    weights w_i [].
    """
    product = torch.empty_like(total)
    for row, w in zip(rows, weights, strict=True):
        total.add_(product.copy_(row).mul_(w))


def compact(v: Tensor) -> Tensor:
    """The tensor, copied if it is a view that keeps much more memory alive than it needs."""
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
        # Split at the first slash: names of tensors may contain slashes, names of parts do not.
        part, _, name = path.partition("/")
        tree.setdefault(part, {})[name] = v
    return tree
