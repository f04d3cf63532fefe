"""A module's forward pass with other tensors in place of its own parameters and buffers."""

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

# Where a module stores a tensor: (holder, key in it), as `tensors_of` yields them.
Place = tuple[Any, Any]
Places = dict[str, tuple[Place, ...]]
# (module, its direct submodules, number of its own parameters and buffers) for each module.
Modules = tuple[tuple[nn.Module, tuple[nn.Module | None, ...], int], ...]


def places(net: nn.Module) -> Places:
    """Where each parameter and buffer is stored, by its name in the network.

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
    """Whether both have the same names in the same places.

    Holders are compared by identity: dictionaries of tensors have no usable `==`.
    """

    def by_id(places: Places) -> dict[str, list[tuple[int, Any]]]:
        return {name: [(id(v), key) for v, key in where] for name, where in places.items()}

    return by_id(one) == by_id(other)


def modules_of(net: nn.Module) -> Modules:
    """The parts of every module of the network, for `changed` to compare with later."""
    return tuple((m, *parts_of(m)) for m in net.modules())


def changed(modules: Modules) -> bool:
    """Whether a module has other parts, or more or fewer tensors, than `modules_of` recorded."""
    return any(parts_of(m) != (parts, count) for m, parts, count in modules)


def retied(places: Places) -> bool:
    """Whether ties have changed: the places of one name differ, or two names share a tensor."""
    distinct = set[int]()
    for where in places.values():
        ids = {id(tensor_at(*place)) for place in where}
        if len(ids) > 1 or ids & distinct:
            return True
        distinct |= ids
    return False


def passing(net: nn.Module) -> list[Tensor]:
    """Intermediate results that layers store as attributes (`weight_norm` its product).

    The next pass computes them again. `copy.deepcopy` refuses them, because they have a graph.
    """
    kept = (v for module in net.modules() for v in vars(module).values() if isinstance(v, Tensor))
    return [v for v in kept if within_vmap(v) or v.grad_fn is not None]


def wrote(copy: Tensor, before: int | None, x: Tensor) -> bool | None:
    """Whether a pass wrote into `copy`, which before it had the values of x and version `before`.

    None if that cannot be known: this torch counts no versions, or the pass ran within vmap.
    """
    if not supported("version") or within_vmap(copy):
        return None
    # Values are compared, too, because writing through `.data` does not change the version. A
    # tensor on the device "meta" has no values.
    return before != version(copy) or not (copy.is_meta or torch.equal(copy, x))


def call(
    net: nn.Module, where: Places, tensors: Params, *inputs: Any, written: Params | None = None
) -> Any:
    """net(*inputs) with `tensors` by name; names that are not given keep the module's tensors.

    If the pass writes into a tensor, it writes into the given one. If it replaces a tensor by a new
    one whose name is in `written`, the new one is stored there. The same as
    `torch.func.functional_call`, without its checks, which at every call cost as much as a small
    layer. Raises InputError for a name that the module does not have.
    """
    try:
        # Look all of them up first: an unknown name must be refused before anything is replaced.
        before = [
            (holder, key, tensor_at(holder, key)) for name in tensors for holder, key in where[name]
        ]
    except KeyError:
        raise misfit(where, tensors) from None
    # The holder is the module itself if torch's private dictionaries may not be used.
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
        # Put the module's own tensors back, also after an error in the pass.
        for holder, key, tensor in before:
            holder[key] = tensor


def _functional_call(
    net: nn.Module, where: Places, tensors: Params, inputs: Any, written: Params | None
) -> Any:
    """`call` with documented functions of torch only."""
    paths = {id(module): path for path, module in net.named_modules()}

    def full(holder: nn.Module, key: str) -> str:
        return f"{paths[id(holder)]}.{key}".lstrip(".")

    given = {full(*place): v for name, v in tensors.items() for place in where[name]}
    # Give every place of a tied tensor: torch's own handling of ties does not restore a layer that
    # is used twice.
    out = functional_call(net, given, inputs, tie_weights=False)
    for name in written or ():
        written[name] = given[full(*where[name][0])]  # type: ignore[index]
    return out


def misfit(where: Places, tensors: Params) -> InputError:
    """The error for tensors that do not fit the module; names the first unknown or missing one."""
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
    """Raise InputError if a network used its own tensors instead of those given.

    outputs: those of a pass by `call` with the leaves `given`, with their graph. `call` replaces
    tensors where modules store them, and puts the module's own back after the pass. So it misses
    tensors that the network also keeps elsewhere, and layers that run again in the backward pass.
    """
    # One number that depends on every output, so that one backward pass reaches every input.
    total = torch.stack([v.abs().sum().double() for v in outputs if v.requires_grad]).sum()
    parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
    again: list[nn.Module] = []
    modules = set(net.modules())  # the hook also sees networks that other threads run meanwhile

    def note(module: nn.Module, inputs: Any) -> None:
        if module in modules:
            again.append(module)

    # Checkpointing calls modules again in the backward pass; only a global hook notices.
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
