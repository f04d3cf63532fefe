"""Data sets of HuggingFace and partitions of Flower Datasets, tested with these libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedshift as fs
from fedshift.errors import InputError

ROWS, SITES = 120, 4


def load(name: str) -> Any:
    """A library, or skip the test. Not at the head of the file: importing these takes seconds."""
    module = pytest.importorskip(name, reason=f"{name} is not installed")
    if module.__file__ is None:  # this folder's tests/datasets
        pytest.skip(f"{name} is not installed")
    return module


@pytest.fixture(scope="module")
def images() -> Any:
    """Pictures of 8 x 10 pixels in colour, with the names of their labels."""
    hub, pil = load("datasets"), load("PIL.Image")
    hub.disable_progress_bars()
    draws = np.random.default_rng(0)
    pictures = [pil.fromarray(draws.integers(0, 256, (8, 10, 3), np.uint8)) for _ in range(ROWS)]
    label = hub.ClassLabel(names=["owl", "cat", "dog"])
    form = hub.Features({"image": hub.Image(), "label": label})
    return hub.Dataset.from_dict({"image": pictures, "label": np.arange(ROWS) % 3}, features=form)


@pytest.fixture(scope="module")
def table() -> Any:
    draws = np.random.default_rng(1)
    columns = {
        "age": draws.integers(20, 90, ROWS),
        "ward": draws.choice(["eyes", "heart"], ROWS),
        "site": np.array(["north", "south", "east", "west"])[np.arange(ROWS) % SITES],
        "outcome": draws.choice(["ill", "well"], ROWS),
    }
    return load("datasets").Dataset.from_dict(columns)


def dealt(name: str, data: Any, **options: Any) -> dict[str, Any]:
    """The partitions that a partitioner of Flower Datasets makes, by number."""
    partitioner = getattr(load("flwr_datasets.partitioner"), name)(**options)
    partitioner.dataset = data
    return {str(i): partitioner.load_partition(i) for i in range(partitioner.num_partitions)}


def pixels(data: Any) -> torch.Tensor:
    """[n, channels, height, width], as a network gets them: in [-1, 1]."""
    x = torch.from_numpy(np.stack([np.array(row["image"]) for row in data]))
    return (x.permute(0, 3, 1, 2) / 255 - 0.5) / 0.5


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("IidPartitioner", {}),
        ("DirichletPartitioner", {"partition_by": "label", "alpha": 1.0, "min_partition_size": 3}),
        ("PathologicalPartitioner", {"partition_by": "label", "num_classes_per_partition": 2}),
    ],
    ids=["iid", "dirichlet", "pathological"],
)
def test_partitions_of_flower_datasets(images: Any, name: str, options: dict[str, Any]) -> None:
    """Every row is its partition's, with pixels and the label's name."""
    parts = dealt(name, images, num_partitions=SITES, **options)
    task = fs.Task.from_datasets(parts, target="3")
    assert task.clients == ("0", "1", "2")
    assert task.input_shape == (3, 8, 10)
    assert task.classes == ("cat", "dog", "owl")
    assert task.places.counts().tolist() == [len(part) for part in parts.values()]
    test = task.build().task.test
    assert torch.equal(test.x, pixels(parts["3"]))
    names = images.features["label"].int2str(parts["3"]["label"])
    assert [task.classes[y] for y in test.y] == names


def test_a_federated_data_set_of_files(images: Any, tmp_path: Path) -> None:
    """`FederatedDataset` reads a local folder; its test split is the target."""
    federated_data_set = load("flwr_datasets").FederatedDataset
    images.to_parquet(tmp_path / "train.parquet")
    images.select(range(30)).to_parquet(tmp_path / "test.parquet")
    options = {"cache_dir": str(tmp_path / "cache")}
    federated = federated_data_set(dataset=str(tmp_path), partitioners={"train": SITES}, **options)
    parts = {f"site {i}": federated.load_partition(i) for i in range(SITES)}
    test = federated.load_split("test")
    task = fs.Task.from_datasets(parts, target=test)
    assert len(task.clients) == SITES
    assert torch.equal(task.build().task.test.x, pixels(test))
    assert fs.fit(task, "linear", rounds=1, progress=False).predict(pixels(images)).names.size


@pytest.mark.parametrize("form", ["numpy", "torch"])
def test_formats_give_the_same_pixels(
    images: Any, form: str, recwarn: pytest.WarningsRecorder
) -> None:
    data = images.with_format(form)
    task = fs.Task.from_partition(data, [range(60), range(60, ROWS)], target="1")
    assert torch.equal(task.build().task.test.x, pixels(images.select(range(60, ROWS))))
    assert not [w for w in recwarn if "writable" in str(w.message)]


def test_columns_are_a_table(table: Any) -> None:
    parts = dealt("NaturalIdPartitioner", table, partition_by="site")
    by_name = {part[0]["site"]: part for part in parts.values()}
    options: dict[str, Any] = {"x": ["age", "ward"], "y": "outcome", "target": "north"}
    task = fs.Task.from_datasets(by_name, **options)
    frame = fs.Task.from_frame(table, client="site", label="outcome", target="north")
    assert task.build().encoding.columns == frame.build().encoding.columns
    assert torch.equal(task.build().task.test.x, frame.build().task.test.x)


def test_tokens_and_rows_without_a_label() -> None:
    hub = load("datasets")
    names = hub.Features(
        {"input_ids": hub.Sequence(hub.Value("int32")), "label": hub.ClassLabel(names=["a", "b"])}
    )
    ids = [[1] * (1 + i % 5) for i in range(12)]
    labels = [-1, *([0, 1] * 6)][:12]
    data = hub.Dataset.from_dict({"input_ids": ids, "label": labels}, features=names)
    task = fs.Task.from_partition(data, [range(6), range(6, 12)], target="1")
    assert task.classes == ("a", "b")
    assert task.input_shape == (5,)
    assert "Left out without a label: 1 row (0: 1)." in str(task)


def test_what_is_no_partition_is_refused(images: Any) -> None:
    splits = images.train_test_split(test_size=0.5)
    with pytest.raises(InputError, match="0 is a DatasetDict of train, test; give one data set"):
        fs.Task.from_datasets({"0": splits, "1": splits}, target="1")
    stream = images.to_iterable_dataset()
    with pytest.raises(InputError, match="0 is an IterableDataset; .* give list"):
        fs.Task.from_datasets({"0": stream, "1": stream}, target="1")
