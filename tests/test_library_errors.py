"""Mistakes in Python get one clear message before training; pages name all options."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift import recipes
from fedshift.algorithms.fedavg import FedAvg
from fedshift.client.local import Local
from fedshift.csv_counts import read_counts, read_target
from fedshift.data import ClientData, Examples, client_data, register
from fedshift.engine.preflight.network import check_model
from fedshift.engine.run import Federation, run
from fedshift.errors import InputError, shown, unknown
from fedshift.experiments.config.load import load_config
from fedshift.model import Model
from fedshift.outputs import dry_logits
from fedshift.record import summary
from fedshift.record.rounds import Metrics
from fedshift.seeds import Seeds
from support.federations import CLASSES, FEATURES, make_clients, make_federation

ROOT = Path(__file__).parents[1]
X, Y = torch.zeros(6, 4), torch.tensor([0, 1, 2, 1, 1, 0])


class Returns(nn.Linear):
    """A linear layer that returns its logits in some container."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__(FEATURES, CLASSES)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(super().forward(x))


def first_round(net: nn.Module, **changed: Any) -> None:
    """Play only the first round of a run."""
    model = Model(net)
    made = make_federation(model)
    parts = {f.name: getattr(made, f.name) for f in fields(Federation)} | changed
    next(run(FedAvg(model, local=Local(batch=8)), Federation(**parts), 1))


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Linear(FEATURES, 2), r"logits \(2, 2\) for 2 inputs; the task has 5 classes"),
        (nn.Linear(FEATURES, 7), r"logits \(2, 7\) for 2 inputs; the task has 5 classes"),
        (nn.Linear(FEATURES, 1), r"logits \(2, 1\) for 2 inputs; the task has 5 classes"),
        (Returns(lambda z: {"out": z}), r'the model returns \[\'out\'\]; it must return "logits"'),
        (Returns(lambda z: (z, z)), "logits are a tuple; its forward must return a tensor"),
        (Returns(lambda z: z[None]), r"logits \(1, 2, 5\) for 2 inputs; they must be \(2, K\)"),
        (nn.Flatten(), "the model has no parameters; there is nothing to train"),
        (nn.Linear(3, CLASSES), r"fails on inputs torch.float32 \(2, 8\): mat1 and mat2 shapes"),
        (nn.Linear(FEATURES, CLASSES).double(), r"are torch.float64: give it x.to\("),
    ],
)
def test_networks_that_do_not_fit_are_refused(net: nn.Module, message: str) -> None:
    with pytest.raises(InputError, match=message):
        first_round(net)


def test_a_network_that_fits_is_let_through() -> None:
    first_round(nn.Linear(FEATURES, CLASSES))
    first_round(Returns(lambda z: {"logits": z, "features": z}))


def test_without_labels_in_the_table_the_largest_label_is_the_bound() -> None:
    sizes = {"n": register(make_clients(), CLASSES)["n"]}
    with pytest.raises(InputError, match="has 4 outputs, and clients hold label 4;.* at least 5"):
        first_round(nn.Linear(FEATURES, 4), table=sizes)
    first_round(nn.Linear(FEATURES, 7), table=sizes)


def test_one_output_is_no_classifier_where_all_labels_are_zero() -> None:
    model = Model(nn.Linear(FEATURES, 1))
    zero = tuple(c._replace(y=torch.zeros_like(c.y)) for c in make_clients())
    check_model(model, make_federation(model, zero))
    with pytest.raises(InputError, match="the task has 5 classes"):
        check_model(model, make_federation(model))


class Noisy(nn.Module):
    """Draws numbers at each pass and writes to a buffer, which a check must undo."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.head(x + torch.rand(x.shape))  # type: ignore[no-any-return]


def test_what_was_given_is_shown_in_one_short_line() -> None:
    """Quoted line breaks would hide half of a message, escapes would colour it."""
    assert shown("fedpals") == "fedpals"
    assert shown("a\n\x1b[31mb") == r"a\n\x1b[31mb"
    assert shown("Bär, 猫") == "Bär, 猫"
    assert shown("x" * 61) == "x" * 57 + "..."
    assert "\n" not in str(unknown("method", "fed\nadam", ["fedadam", "x" * 99]))
    assert len(str(unknown("class", "y" * 99, ["y" * 98 + "z"]))) < 300


def test_the_check_leaves_no_trace() -> None:
    model, x = Model(Noisy()), make_clients()[0].x[:2]
    params, buffers = model.init()
    before = torch.get_rng_state()
    dry_logits(model, params, buffers, x)
    assert torch.equal(torch.get_rng_state(), before)
    assert float(buffers["seen"]) == 0
    model(params, buffers, x)  # leaves a count, and no draw
    assert torch.equal(torch.get_rng_state(), before)
    assert float(buffers["seen"]) == 1
    model.net(x)  # a pass of torch's own leaves one
    assert not torch.equal(torch.get_rng_state(), before)


def test_a_batch_of_one_says_what_to_do(normed: Model) -> None:
    federation = make_federation(normed, make_clients(sizes=(16, 9)))
    with pytest.raises(InputError, match=r"client 1 has n = 9 .* batch size, such as 9, or use"):
        run(FedAvg(normed, local=Local(batch=8)), federation, 1)
    next(run(FedAvg(normed, local=Local(batch=9)), federation, 1))
    next(run(FedAvg(normed, local=Local(batch=8, steps=1)), federation, 1))
    alone = make_federation(normed, make_clients(sizes=(16, 1)))
    with pytest.raises(InputError, match=r"n = 1 examples, .* leave this client out, or use"):
        run(FedAvg(normed, local=Local(batch=8)), alone, 1)


def test_a_prefix_that_matches_no_parameter_is_refused(mlp: Model) -> None:
    for name in ("only", "frozen"):
        algorithm = FedAvg(mlp, local=Local(**{name: ("haed.",)}))
        message = f'{name} prefix "haed." matches no parameter; .* Did you mean "head."'
        with pytest.raises(InputError, match=message):
            next(run(algorithm, make_federation(mlp), 1))


@pytest.mark.parametrize(
    ("x", "y", "client", "message"),
    [
        (X, Y[:2], 0, "client 0 has 6 inputs and 2 labels; give as many"),
        (X, Y - 1, 3, "client 3 has label -1; labels are 0, 1, ..., K-1"),
        (X, Y.float(), 3, r"client 3: labels are torch.float32; .*give whole numbers"),
        (X, (Y - 1).view(torch.uint64), 3, f"client 3 has label {2**64 - 1}; labels are 0, 1"),
        (X, Y[:, None], 3, r"client 3: labels of shape \(6, 1\); give one per example"),
        (X, [0] * 6, 3, r"client 3: y is a list; give torch.as_tensor\(y\)"),
        (X.numpy(), Y, 3, r"client 3: x is a ndarray; give torch.as_tensor\(x\)"),
        (X, Y, "a", "client id 'a': must be a whole number"),
        (X, Y, -1, "client id -1: must be a whole number, 0 for the first client"),
    ],
)
def test_clients_that_cannot_be_are_refused(x: Any, y: Any, client: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        client_data(x, y, client)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (Y.float(), r"a set of examples: labels are torch.float32; .*give whole numbers"),
        (Y[:, None], r"labels of shape \(6, 1\); give one per example"),
        ((Y - 1).view(torch.uint64), f"label {2**64 - 1}; labels are 0, 1"),
    ],
)
def test_test_data_that_cannot_be_are_refused(y: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Examples(X, y)
    assert Examples(X, Y.to(torch.uint16)).y.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16, torch.int64])
def test_labels_of_any_integer_type_become_int64(dtype: torch.dtype) -> None:
    data = client_data(X, Y.to(dtype), 0)
    assert data.y.dtype == torch.int64
    assert torch.equal(data.y, Y)


def two(second: ClientData, first: ClientData | None = None) -> Federation:
    clients = [client_data(X, Y, 0) if first is None else first, second]
    table = {"n": torch.tensor([6.0, 6.0]).double()}
    return Federation(clients, *Model(nn.Linear(4, 3)).init(), table, Seeds.of(0))


def test_federations_that_do_not_fit_are_refused() -> None:
    other = client_data(X, Y, 1)
    assert len(two(other).clients) == 2
    with pytest.raises(InputError, match=r"ids must be 0\.\.1 in order, got \[0, 0\]; an id is"):
        two(client_data(X, Y, 0))
    with pytest.raises(InputError, match=r"ids must be 0\.\.1 in order, got \[1, 0\]"):
        two(client_data(X, Y, 0), other)
    with pytest.raises(InputError, match=r"client 1: x is torch.float64, client 0's is .*float32"):
        two(client_data(X.double(), Y, 1))
    with pytest.raises(InputError, match="client 1: labels are torch.int32; client_data makes"):
        two(other._replace(y=Y.int()))
    with pytest.raises(InputError, match="client 1 has label -1"):
        two(other._replace(y=Y - 1))
    with pytest.raises(InputError, match="no clients; give at least one"):
        Federation((), {}, {}, {}, Seeds.of(0))
    with pytest.raises(InputError, match='1 clients and 2 rows of "n" in the table'):
        Federation([client_data(X, Y, 0)], {}, {}, two(other).table, Seeds.of(0))


def test_registration_refuses() -> None:
    with pytest.raises(InputError, match=r"client 1 has label 2; with 2 classes labels are 0\.\.1"):
        register([client_data(X[:2], Y[:2], 0), client_data(X, Y, 1)], 2)
    with pytest.raises(InputError, match="no clients; give at least one"):
        register([], 3)


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def test_the_example_file_loads(tmp_path: Path) -> None:
    block = re.search(r"```toml\n(.*?)```", page("configuration"), re.S)
    assert block is not None
    file = tmp_path / "experiment.toml"
    file.write_text(block.group(1))
    config = load_config(file)
    assert (config.method.name, config.method.options) == ("fedpals", {"ess": 0.5})
    file.write_text(block.group(1).replace("ess =", "es ="))
    with pytest.raises(InputError, match="did you mean|Did you mean"):
        load_config(file)


def test_every_option_of_every_method_is_documented() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page("configuration"), re.M))
    for one in recipes.recipes():
        for name, option in one.options.items():
            assert f"`{name}`" in rows[one.name], (one.name, name)
            if option.default not in (None, inspect.Parameter.empty):
                shown = json.dumps(option.default)
                assert f"`{name}` ({shown}" in rows[one.name], (one.name, name)


def test_every_column_and_key_of_a_run_folder_is_documented() -> None:
    text = page("files")
    for field in fields(Metrics):
        assert f"`{field.name}`" in text, field.name
    classes = (k for _, k in inspect.getmembers(summary, is_dataclass))
    schemas = (k for k in classes if k.__module__ == summary.__name__)
    keys = {f.name for k in schemas for f in fields(k)} - {"others"}  # a selector's own measures
    assert len(keys) > 30
    for key in keys:
        assert f"`{key}`" in text, key


def test_the_example_tables_are_read(tmp_path: Path) -> None:
    """The two CSV examples of files.md, by the readers of `fedshift diagnose`."""
    blocks = re.findall(r"```text\n(.*?)```", page("files"), re.S)
    for name, block in zip(("counts", "target"), blocks, strict=True):
        (tmp_path / f"{name}.csv").write_text(block)
    table = read_counts(tmp_path / "counts.csv")
    assert table.clients == ("north", "south")
    assert table.counts.tolist() == [[120, 30, 0], [0, 80, 80]]
    assert read_target(tmp_path / "target.csv", table.classes).tolist() == [0.5, 0.25, 0.25]


def test_the_page_about_selectors_is_short_and_names_them() -> None:
    text = page("selection")
    assert len(text.splitlines()) <= 40
    for rule in ("estimate", "validation", "source", "oracle"):
        assert f"`{rule}`" in text
