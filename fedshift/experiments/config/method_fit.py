"""Whether a configured method can be built: its own checks, run before any data are loaded."""

from __future__ import annotations

import torch
from torch import nn

from fedshift import recipes
from fedshift.data import Examples
from fedshift.errors import InputError
from fedshift.experiments.config import training_objects
from fedshift.experiments.config.networks import ROUTED, unrouted
from fedshift.experiments.config.python_names import is_python
from fedshift.experiments.config.schema import PYTHON, Config, Method, Network, Training
from fedshift.experiments.config.wording import file_words
from fedshift.model import build
from fedshift.recipes.setting import SettingError

Problem = tuple[tuple[str, ...], str]


class _StandIn(nn.Module):
    """A network in which recipes find what they check for: a head, and a body if there is one."""

    def __init__(self, body: bool, fixed: bool) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1)
        self.head.weight.requires_grad_(not fixed)
        if body:
            self.body = nn.Linear(1, 1)


def has_body(model: Network) -> bool:
    """Whether the configured network has layers before its last one."""
    return model.name != "linear" and (model.name != "mlp" or bool(model.hidden))


def _is_yours(model: Network) -> bool:
    return model.name == PYTHON or is_python(model.name)


def _may_be_fixed(model: Network, recipe: recipes.Recipe) -> bool:
    """Whether the classifier may be fixed; a user's network shows that only once it is built."""
    return model.classifier == "etf" or recipe.traits.fixed_head or _is_yours(model)


def _classifier_misfit(model: Network, recipe: recipes.Recipe) -> Problem | None:
    fixed = recipe.traits.fixed_head
    if fixed and model.classifier == "linear":
        why = f"{recipe.name} trains under a fixed classifier"
        return ("model", "classifier"), f'{why}; give classifier = "etf", or leave it out'
    etf = (model.classifier == "etf" or fixed) and not _is_yours(model)
    if model.temperature is not None and not etf:
        why = "temperature is that of the library's networks"
        return ("model", "temperature"), f'{why} with classifier = "etf"; leave it out'
    return None


def misfits(config: Config) -> list[Problem]:
    """Why the method cannot be built as configured, as (key, message); [] if it can.

    A user's own method is checked when it is loaded: reading a configuration runs no Python.
    """
    name, method = config.model.name, config.method
    if method.name == PYTHON or is_python(method.name):
        return []
    recipe = recipes.recipe(method.name, method.options)
    if recipe.traits.router and not (name in (PYTHON, *ROUTED) or is_python(name)):
        return [(("model", "name"), unrouted(name))]
    if misfit := _classifier_misfit(config.model, recipe):
        return [misfit]
    # In place of the server's examples, since recipes check only whether there are any.
    n = config.server.unlabeled
    inputs = torch.zeros(n, 1) if n else None
    # The real network cannot be built yet: it needs the shape of the data, which are not loaded.
    stand_in = build(
        lambda: _StandIn(has_body(config.model), _may_be_fixed(config.model, recipe)), 0
    )
    examples = Examples(torch.zeros(1, 1), torch.zeros(1).long())
    setting = training_objects.setting(
        config.training, stand_in, (1.0,), clients=config.shift.clients,
        seed=config.seeds.resolved().init, server_inputs=inputs,
        server_examples=examples if config.server.validation else None,
    )  # fmt: skip
    options = method.options
    if options.get("ess") == "auto":
        if options.get("lam") is not None:
            return [
                (("method", "lam"), 'method.lam and method.ess = "auto" are both given; drop one')
            ]
        # Any number will do here. The candidates are checked when their grid is known.
        options = options | {"ess": 1.0}
    try:
        recipe.make(setting, **options)
    except SettingError as e:
        return [_advise(e, method, config.model, config.training)]
    except InputError as e:
        return [(("method",), file_words(str(e), "method", named_alike(recipe)))]
    return []


def named_alike(recipe: recipes.Recipe) -> dict[str, str]:
    """A recipe's options as `file_words` needs them: they have the same names in files."""
    return {name: name for name in recipe.options}


def _advise(error: SettingError, method: Method, model: Network, training: Training) -> Problem:
    """The key at fault and a message with advice, for a setting that the recipe cannot use."""
    if error.part == "head":
        return ("model", "name"), (
            f'model.name = "{model.name}"{" without hidden layers" * (model.name == "mlp")} has no '
            f'body, only a last layer, and method.name "{method.name}" treats body and head apart; '
            'use a network with both, as "mlp", "lenet" or "lenet-gn"'
        )
    if error.part == "few":
        return ("training", "steps"), f"training.steps: {error}"
    epochs = training.epochs is not None
    drop = " and leave out training.epochs" if epochs else ""
    key = ("training", "epochs" if epochs else "steps")
    return key, f"training.steps: {error.problem}; set training.steps = 10{drop}"
