"""The texts that describe how clients' inputs differ."""

from __future__ import annotations

from typing import Any

from fedshift.experiments.config.load import validate
from fedshift.experiments.task.feature_shift import look_name, look_names
from fedshift.shifts import covariate


def test_looks_are_named_by_their_steps() -> None:
    assert [look_name(t) for t in covariate.fashion_pool()[:4]] == [
        "brightness 0.5", "brightness 1.5", "brightness 0.5, invert", "brightness 1.5, invert",
    ]  # fmt: skip
    assert look_name(covariate.bit_pool("high")[0]) == "saturation 0.5, hue -0.1, gamma 0.6"
    assert look_name(covariate.wide_pool()[53]) == "saturation 1.6, hue +0.15, gamma 1.4, 2 bits"
    assert look_name(covariate.Compose(())) == "unchanged"
    assert look_name(abs) == "builtin_function_or_method"
    for pool in (covariate.fashion_pool(), covariate.bit_pool("low"), covariate.wide_pool()):
        assert len({look_name(t) for t in pool}) == len(pool)


def test_a_configuration_names_looks_or_sites() -> None:
    shift = {"kind": "iid", "clients": 2, "target": "clients"}

    def names(tables: dict[str, Any]) -> tuple[str, ...] | None:
        config = validate(tables)
        return look_names(config.shift, config.data.name, config.shift.clients, 0)

    assert names({"shift": shift}) is None
    assert names({"shift": shift | {"transform": "fashion"}}) == (
        "brightness 0.5",
        "brightness 1.5",
    )
    heart = {"data": {"name": "heart-disease"}, "shift": shift | {"kind": "natural", "clients": 4}}
    assert names(heart) == ("cleveland", "hungarian", "switzerland", "va")
