"""Every recipe on a federation: allowed as docs/flower.md says, with the numbers of one process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift import recipes
from fedshift.errors import InputError
from fedshift.experiments.config.load import dumps, validate
from fedshift_deploy.machines.deployable import check_start, configured
from support.federation_grid import Watched, here, served
from support.own_sites import FILE, resolved

PAGE = Path(__file__).parents[2] / "docs" / "flower.md"
NAMES = [one.name for one in recipes.recipes()]
CLIENTS = {"target": "clients", "kind": "dirichlet-per-client", "beta": 1.0, "clients": 3}
SERVER = {"kind": "sparsity", "labels_per_client": 4, "clients": 3}
UNION = {"target": "union", "kind": "label-sets", "labels_per_client": 5, "samples": 60}
# By one process and by sites alike; the others of a run need all models in one place.
SAME = (
    "average_accuracy", "worst_accuracy", "oracle_routed", "global_accuracy", "source_accuracy",
    "estimated_accuracy", "client_accuracy",
)  # fmt: skip


def rows() -> list[tuple[list[str], tuple[str, str]]]:
    """(methods, the page's cells for a target at the server, and at the clients), by row."""
    text = PAGE.read_text(encoding="utf-8").partition("### Which methods run where")[2]
    lines = [row.split("|")[1:4] for row in text.partition("###")[0].splitlines() if "| yes" in row]
    return [(re.findall(r"`(\w+)`", row[0]), (row[1].strip(), row[2].strip())) for row in lines]


def table() -> dict[str, tuple[str, str]]:
    """The page's cells by recipe; the last row holds for all others."""
    *some, (none, others) = rows()
    assert not none
    named = {name: cells for names, cells in some for name in names if name in NAMES}
    return dict.fromkeys(NAMES, others) | named


def experiment(name: str, shift: dict[str, Any], **options: Any) -> str:
    """Two rounds of three small clients by a recipe."""
    one = recipes.recipe(name)
    if shift is SERVER and name.startswith("labelset"):
        shift = UNION | {"clients": 3}
    training = {"rounds": 2, "steps": 6, "lr": 0.05, "evaluate_every": 1}
    few = {"density_rounds": 1, "weighing_rounds": 1, "hidden": [6]}
    given = {k: v for k, v in few.items() if k in one.options}
    training |= {"rounds": 4} if given else {}
    given |= {k: 1 for k in ("tune_rounds",) if k in one.options and "tune" not in one.options}
    given |= {k: 0 for k in ("byzantine",) if k in one.options}
    given |= {"ess": 0.5} if name == "fedpals" else {}
    # Clients that score the server's model would be sent the rows of all labels.
    unscored = {"validation": 0} if shift == UNION | {"clients": 3} else {}
    data: dict[str, Any] = {"name": "fashion-mnist-mini"} | unscored
    return dumps(validate({
        "name": "run", "data": data if "samples" in shift else data | {"limit": 300},
        "shift": shift, "training": training, "method": {"name": name, **given, **options},
        "model": {"name": "mlp-projected" if one.traits.router else "mlp", "hidden": [8]},
    }))  # fmt: skip


def test_the_page_names_recipes_once() -> None:
    named = [name for names, _ in rows() for name in names]
    assert len(named) == len(set(named)) > 0
    # Those of fedshift_papers are known where that package is loaded.
    assert {name for name in named if not name.endswith("_drm_repo")} < set(NAMES)


QUICK = ("fedpac", "labelset_fedavg")


def some(names: Iterable[str], of: Callable[[str], bool] = lambda name: True) -> list[Any]:
    """Recipes as parameters of a test: those of QUICK, and the others where tests may be slow."""
    marks: dict[bool, Any] = {True: (), False: pytest.mark.slow}
    return [pytest.param(name, marks=marks[name in QUICK]) for name in names if of(name)]


@pytest.mark.parametrize("name", some(NAMES))
def test_init_takes_and_refuses_what_the_page_says(name: str) -> None:
    for shift, answer in zip((SERVER, CLIENTS), table()[name], strict=True):
        config = configured(experiment(name, shift))
        if answer == "yes":
            assert check_start(config) == ""
            continue
        assert answer.startswith("refused")
        wrong = "leaves every client with a model" if shift is SERVER else "needs \"?'?sets"
        with pytest.raises(InputError, match=wrong):
            check_start(config)


@pytest.mark.slow
def test_whole_models_of_private_sets_are_not_scored() -> None:
    for mode, refused in (("private", True), ("public", False)):
        text = experiment("labelset_fedavg", SERVER, mode=mode)
        scored = re.sub(r"(?m)^validation = .*$", "validation = 0.2", text, count=1)
        assert scored != text
        assert check_start(configured(text)) == ""
        with pytest.raises(InputError, match=r"data\.validation = 0") if refused else nullcontext():
            assert check_start(configured(scored)) == ""


def test_init_refuses_what_a_run_refuses(tmp_path: Path) -> None:
    """Also where the server has no row for a trial."""
    own = FILE.replace('"fedpals"\ness = 0.5', '"krum"\nbyzantine = 1')
    kept = experiment("fedper", CLIENTS).replace('keep = "last"', 'keep = "best"')
    for text, words in (
        (experiment("krum", SERVER, byzantine=1), "3 clients' changes are too few"),
        (resolved(tmp_path, own), "3 clients' changes are too few"),
        (kept, 'keep = "best"'),
    ):
        with pytest.raises(InputError, match=words):
            check_start(configured(text))


@pytest.mark.parametrize("name", ["scaffold", "ditto", "fedper", "fedpac", "local_only"])
def test_clients_with_data_of_their_own(name: str, tmp_path: Path) -> None:
    """Methods without a common model are refused, unless clients serve their own."""
    file = FILE.replace('"fedpals"\ness = 0.5', f'"{name}"')
    if table()[name][0] != "yes":
        with pytest.raises(InputError, match="leaves every client with a model of its own"):
            check_start(configured(resolved(tmp_path, file)))
        file = file.replace("target = {well = 0.3, ill = 0.7}", 'target = "clients"')
    assert check_start(configured(resolved(tmp_path, file))) == ""


def both(name: str, shift: dict[str, Any], place: Path, **options: Any) -> tuple[Path, Path]:
    text = experiment(name, shift, **options)
    one = here(text, place / "here")
    return one, Watched(text, place / "there", place / "kept", refit=False).serve()


@pytest.mark.parametrize("name", some(NAMES, lambda name: not name.startswith("labelset")))
def test_own_models_do_as_in_one_process(name: str, tmp_path: Path) -> None:
    one, there = map(served, both(name, CLIENTS, tmp_path))
    assert {k: there[k] for k in SAME} == {k: one[k] for k in SAME}
    assert one["system_accuracy"] is not None
    assert there["system_accuracy"] is None


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("labelset")])
def test_public_label_sets(name: str, tmp_path: Path) -> None:
    one, there = map(served, both(name, CLIENTS, tmp_path, mode="public"))
    assert {k: there[k] for k in SAME} == {k: one[k] for k in SAME}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, answer in table().items() if answer[0] == "yes"])
def test_a_target_of_the_servers(name: str, tmp_path: Path) -> None:
    one, there = both(name, SERVER, tmp_path)
    for file in ("summary.json", "model.safetensors", "metrics.csv", "clients.csv"):
        assert (one / file).read_bytes() == (there / file).read_bytes(), file


@pytest.mark.slow
def test_a_report_of_sites(tmp_path: Path) -> None:
    """Pages and summaries leave out what no site can know."""
    from fedshift.cli.results import draw, run_json

    _, there = both("ditto", CLIENTS, tmp_path)
    page = draw([there], there)
    text = page.read_text(encoding="utf-8")
    assert "stayed at its site" in text
    assert "nan" not in re.sub(r"<[^>]*>", "", text).lower().split()
    assert json.dumps(run_json(there, page))
