"""Gradient oracles: a wrapper takes the gradient function and gives another."""

from __future__ import annotations

from dataclasses import dataclass

from fedshift.client.local import GradFn, Gradient
from fedshift.tree import Params, add


@dataclass(frozen=True, eq=False)
class Shift:
    """g(theta) + by: a constant correction, such as SCAFFOLD's c - c_i.

    Names that `by` has beyond the gradient's are ignored: in a phase where only a part of the
    model moves, only that part is corrected.
    """

    by: Params

    def __call__(self, gradient: GradFn) -> GradFn:
        def shifted(params: Params) -> Gradient:
            found = gradient(params)
            return found._replace(grad=add(found.grad, {k: self.by[k] for k in found.grad}))

        return shifted
