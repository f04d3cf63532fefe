"""What every recipe builds on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from fedshift.arguments import check_fields
from fedshift.client.local import Local
from fedshift.data import Examples
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.server.optimizers import ServerOptimizer, Sgd
from fedshift.sketch import sketched

Part = Literal["steps", "few", "head"]


@sketched
@dataclass(frozen=True)
class Setting:
    """The network, the target T [K], local SGD and the server's optimiser.

    head           name prefixes of the parameters that make the classifier; all others are the body
    rounds         rounds of the whole run, for methods whose last rounds differ
    clients        number of clients N, for methods that distinguish clients
    server_inputs  unlabeled inputs [n, ...] that the server holds, for methods that tune there
    server_examples  labelled ones, for methods that measure or fit there
    shape          of one input, for methods that fit a network of their own to inputs
    cap            the largest weight of a client, for rules that find the best weights under it
    seed           of the first weights (and masks) of such networks, the same for all clients; and,
                   on the server alone, of the orders of label sets' slots
    two_values     (low, high) where every input is one of these two, for methods that fit densities
    log_ratios     log p(x) - log q_i(x) [n_i] of each client's examples, p the density of all
                   clients' inputs and q_i of its own, where both are known

    >>> import torch
    >>> from fedshift.recipes import Setting, fedprox
    >>> model = fs.Model(torch.nn.Linear(4, 2))
    >>> setting = Setting(model, target=(0.5, 0.5), local=fs.Local(lr=0.2))
    >>> fedprox(setting, mu=0.1).local.lr
    0.2
    """

    model: Model
    target: tuple[float, ...]
    local: Local = Local()
    server: ServerOptimizer = Sgd()
    head: tuple[str, ...] = ("head.",)
    rounds: int | None = None
    clients: int | None = None
    server_inputs: Tensor | None = field(default=None, repr=False, compare=False)
    server_examples: Examples | None = field(default=None, repr=False, compare=False)
    shape: tuple[int, ...] | None = None
    cap: float | None = None
    seed: int = 0
    two_values: tuple[float, float] | None = None
    log_ratios: tuple[Tensor, ...] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A text would be taken letter by letter: "head." would match every name with h, e, a or d.
        if isinstance(self.head, str):
            raise InputError(
                f'Setting.head is the text "{self.head}"; it must be a tuple of name prefixes: '
                f'head=("{self.head}",)'
            )
        check_fields(self)
        # Each share, too: a negative one can be hidden in a sum of 1.
        if not all(0 <= t <= 1 for t in self.target) or abs(sum(self.target) - 1) > 1e-6:
            raise InputError(
                f"Setting.target must be shares from 0 to 1 that sum to 1, got {self.target}"
            )


class SettingError(InputError):
    """A setting that a recipe cannot use: the problem, and `advice` for Python callers.

    part  the part of the setting; the reader of experiment files gives its own advice for it
    """

    def __init__(self, problem: str, part: Part, advice: str) -> None:
        super().__init__(f"{problem}{advice}")
        self.problem, self.part = problem, part
