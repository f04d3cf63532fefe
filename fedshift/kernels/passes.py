"""A module's forward pass with given tensors in place of those that it holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_pre_hook

from fedshift.errors import InputError, nearest, shown
from fedshift.kernels.torch_private import (
    parts_of,
    supported,
    tensor_at,
    tensors_of,
    version,
    within_vmap,
)
from fedshift.tree import Params

# Where a tensor is: its holder and the key in it, as `tensors_of` gives them.
Place = tuple[Any, Any]
Places = dict[str, tuple[Place, ...]]
# Each module, its submodules, and how many parameters and buffers it has itself.
Modules = tuple[tuple[nn.Module, tuple[nn.Module | None, ...], int], ...]


def places(net: nn.Module) -> Places:
    """Where the module holds each parameter and buffer, by the name that it has there.

    A tensor that several modules share has one name and several places.
    """
    # By id: tied weights are one tensor in several modules, and only one of their names is listed.
    names = {id(v): k for k, v in (*net.named_parameters(), *net.named_buffers())}
    by_name: dict[str, list[Place]] = {name: [] for name in names.values()}
    for module in net.modules():
        for holder, key, value in tensors_of(module):
            if id(value) in names:
                by_name[names[id(value)]].append((holder, key))
    return {name: tuple(where) for name, where in by_name.items()}


def same_places(one: Places, other: Places) -> bool:
    """Whether both have the same names in the same places."""

    def by_id(places: Places) -> dict[str, list[tuple[int, Any]]]:
        return {name: [(id(v), key) for v, key in where] for name, where in places.items()}

    return by_id(one) == by_id(other)


def modules_of(net: nn.Module) -> Modules:
    """What every module of the network consists of, for `changed`."""
    return tuple((m, *parts_of(m)) for m in net.modules())


def changed(modules: Modules) -> bool:
    """Whether one of these modules has other parts, or more or fewer tensors, than it had."""
    return any(parts_of(m) != (parts, count) for m, parts, count in modules)


def retied(places: Places) -> bool:
    """Whether a name's places hold several tensors now, or several names hold one tensor."""
    distinct = set[int]()
    for where in places.values():
        ids = {id(tensor_at(*place)) for place in where}
        if len(ids) > 1 or ids & distinct:
            return True
        distinct |= ids
    return False


def passing(net: nn.Module) -> list[Tensor]:
    """What layers keep of their last pass (`weight_norm` its product), and compute again at the
    next one. It cannot be copied.
    """
    kept = (v for module in net.modules() for v in vars(module).values() if isinstance(v, Tensor))
    return [v for v in kept if within_vmap(v) or v.grad_fn is not None]


def wrote(copy: Tensor, before: int | None, x: Tensor) -> bool | None:
    """Whether a pass wrote into `copy`, which was x and of version `before`.

    None where it cannot be seen: where torch tells no versions, and within vmap.
    """
    if not supported("version") or within_vmap(copy):
        return None
    # A tensor of the device "meta" has no values at all.
    return before != version(copy) or not (copy.is_meta or torch.equal(copy, x))


def call(
    net: nn.Module, where: Places, tensors: Params, *inputs: Any, written: Params | None = None
) -> Any:
    """net(*inputs) with `tensors` by name; names that are not given keep the module's tensors.

    What the pass writes goes to the given tensors. `written` receives tensors that the pass
    replaced, for the names that it already has. Does what
    `torch.func.functional_call` does, whose checks at every call cost as much as a small layer.
    Raises InputError for a name that the module does not have.
    """
    try:
        # Read first, all of them: an unknown name must be refused before anything is replaced.
        before = [
            (holder, key, tensor_at(holder, key)) for name in tensors for holder, key in where[name]
        ]
    except KeyError:
        raise misfit(where, tensors) from None
    # `tensors_of` gives the module itself as holder where torch's dictionaries may not be used.
    if before and isinstance(before[0][0], nn.Module):
        return _functional_call(net, where, tensors, inputs, written)
    try:
        for name, tensor in tensors.items():
            for holder, key in where[name]:
                holder[key] = tensor
        out = net(*inputs)
        for name in written or ():
            holder, key = where[name][0]
            # Counters such as BatchNorm's may be replaced by a new tensor, not written to in place.
            if holder[key] is not tensors[name]:
                written[name] = holder[key]  # type: ignore[index]
        return out
    finally:
        for holder, key, tensor in before:
            holder[key] = tensor


def _functional_call(
    net: nn.Module, where: Places, tensors: Params, inputs: Any, written: Params | None
) -> Any:
    """`call` by documented parts of torch alone."""
    paths = {id(module): path for path, module in net.named_modules()}

    def full(holder: nn.Module, key: str) -> str:
        return f"{paths[id(holder)]}.{key}".lstrip(".")

    given = {full(*place): v for name, v in tensors.items() for place in where[name]}
    # All places are given: torch's handling of ties would leave a layer that is used twice changed.
    out = functional_call(net, given, inputs, tie_weights=False)
    for name in written or ():
        written[name] = given[full(*where[name][0])]  # type: ignore[index]
    return out


def misfit(where: Places, tensors: Params) -> InputError:
    """The error for tensors that are not the module's, by the first name that is odd or missing."""
    some = ", ".join(list(where)[:8])
    for name in tensors:
        if not all(
            key in holder
            for holder, key in where.get(name, (({}, name),))
            if isinstance(holder, dict)
        ):
            return InputError(
                f'the network has no parameter or buffer "{shown(name)}"; it has {some}.'
                f"{nearest(name, where)}"
            )
    missing = [name for name in where if name not in tensors]
    return InputError(
        f'"{missing[0]}" is missing among the parameters and buffers given; the network has '
        f"{some}: give all of them, as model.init() has them"
    )


def check_own(net: nn.Module, outputs: Iterable[Tensor], given: Iterable[Tensor]) -> None:
    """Raise InputError where a network used the tensors that it holds instead of those given.

    outputs: of a pass by `call` on the leaves `given`, with their graph. By the time of a backward
    pass the module holds its tensors again, and those that it reads by other references were never
    replaced.
    """
    # One number that depends on every output, so that one backward pass reaches all it was made of.
    total = torch.stack([v.abs().sum().double() for v in outputs if v.requires_grad]).sum()
    parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
    again: list[nn.Module] = []
    inside = set(net.modules())  # other threads may run other networks at the same time

    def note(module: nn.Module, inputs: Any) -> None:
        if module in inside:
            again.append(module)

    # Checkpointing calls modules again during the backward pass, which only a global hook sees.
    hook = register_module_forward_pre_hook(note)
    try:
        reached = torch.autograd.grad(total, (*parameters.values(), *given), allow_unused=True)
    finally:
        hook.remove()
    if again:
        raise InputError(
            f"the network's {type(again[0]).__name__} is computed again in the backward pass, as "
            "by torch.utils.checkpoint, where it would have other weights; leave that out"
        )
    for name, grad in zip(parameters, reached, strict=False):  # parameters come first
        if grad is not None:
            raise InputError(
                f'the network reads "{name}" by another reference than its module\'s, as a list of '
                "parameters; read it by the module's attribute, else it is not trained"
            )
