"""Former names of `fedshift.algorithms.method`, until the engine calls methods directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from fedshift.algorithms.method import LabelRules as LabelRules
from fedshift.algorithms.method import Method
from fedshift.algorithms.method import check_method as check_method
from fedshift.algorithms.method import is_elementwise as is_elementwise
from fedshift.algorithms.method import numbered as numbered
from fedshift.algorithms.method import rows as rows

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Algorithm = Method
Capabilities = Method


def ask(
    method: object,
    capability: Callable[Concatenate[Any, Arguments], Answer],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Answer:
    """A method's answer for one of `Capabilities`."""
    answer: Answer = getattr(method, capability.__name__)(*args, **kwargs)
    return answer
