"""Images among several inputs: bytes are scaled as those of a single input, ids and masks stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedshift as fs
from fedshift.tasks.encoding import Encoding
from fedshift.tasks.layout import Layout, Part

DRAWS = np.random.default_rng(0)
PIXELS = DRAWS.integers(0, 256, (40, 3, 4, 4)).astype(np.uint8)
IDS, MASK = DRAWS.integers(0, 20, (40, 5)), DRAWS.random((40, 5)) < 0.5
Y, CLIENT = DRAWS.integers(0, 2, 40), np.arange(40) % 4
FORMS: dict[str, Any] = {
    "tuple": (PIXELS, IDS, MASK),
    "dict": {"image": PIXELS, "ids": IDS, "mask": MASK},
}


def received(x: Any) -> list[Tensor]:
    """What a network gets of the first client's first row."""
    built = fs.Task.from_arrays(x, Y, client=CLIENT, target="3").build()
    layout = built.encoding.layout
    first = built.task.clients[0].x
    given = first if layout is None else layout.unpack(first)
    given = given.values() if isinstance(given, dict) else given
    return list(given) if layout else [given]


@pytest.mark.parametrize("form", FORMS)
def test_bytes_among_several_inputs_are_scaled_as_alone(form: str) -> None:
    image, ids, mask = received(FORMS[form])
    (alone,) = received(PIXELS)
    assert torch.equal(image, alone)
    assert -1 <= float(image.min()) < 0 < float(image.max()) <= 1
    assert (ids.dtype, mask.dtype) == (torch.int64, torch.bool)
    assert int(ids.max()) > 1  # control: whole numbers stay as they are


def test_channels_come_first_and_grey_images_have_one() -> None:
    last = PIXELS.transpose(0, 2, 3, 1)
    assert torch.equal(received((last, IDS))[0], received((PIXELS, IDS))[0])
    assert received((PIXELS[:, 0], IDS))[0].shape[1:] == (1, 4, 4)
    # Control: bytes [n, L] are whole numbers, as ids of a small vocabulary are.
    assert received((PIXELS, IDS.astype(np.uint8)))[1].dtype == torch.int64


def test_padded_sequences_of_bytes_are_no_images() -> None:
    texts = [IDS[i, : 2 + i % 3].astype(np.uint8) for i in range(40)]
    ids, mask, image = received((texts, PIXELS))
    assert ids.dtype == torch.int64
    assert mask.dtype == torch.bool
    assert image.dtype == torch.float32


class Seeing(nn.Module):
    def __init__(self, task: fs.Task) -> None:
        super().__init__()
        self.look, self.words = nn.Linear(48, 2), nn.Embedding(20, 2)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        assert x["image"].dtype == torch.float32
        assert float(x["image"].abs().max()) <= 1
        return self.look(x["image"].flatten(1)) + self.words(x["ids"]).sum(1)


def test_rows_to_predict_go_through_the_same(tmp_path: Any) -> None:
    """Before and after saving, with channels first or last; control: other pixels."""
    x = {"image": PIXELS, "ids": IDS}
    task = fs.Task.from_arrays(x, Y, client=CLIENT, target="3")
    result = fs.fit(task, Seeing, rounds=1, progress=False)
    given = result.predict(x).probabilities
    again = fs.load(result.save(tmp_path / "run"), net=Seeing)
    last = {"image": PIXELS.transpose(0, 2, 3, 1), "ids": IDS}
    assert (again.predict(last).probabilities == given).all()
    assert (again.predict({"image": 255 - PIXELS, "ids": IDS}).probabilities != given).any()


def test_layouts_of_before_are_read_as_they_were() -> None:
    """In those versions images beside other inputs were whole numbers."""
    layout = Layout((Part("image", (3, 4, 4), "int64"), Part("ids", (5,), "int64")), "tuple")
    encoding = Encoding.from_json(Encoding(("0", "1"), layout=layout).to_json())
    row = encoding.apply((PIXELS, IDS))
    assert torch.equal(layout.unpack(row)[0], torch.from_numpy(PIXELS).long())
