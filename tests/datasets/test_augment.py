"""Random changes of training images: each against another solver, and where they are applied."""

from __future__ import annotations

import colorsys
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedshift.algorithms.afl import RISK, mean_risk
from fedshift.client.gradients import pass_gradient
from fedshift.client.local import Local, gradient_of, plan_all
from fedshift.client.objectives import CrossEntropy
from fedshift.client.oracles import Sam
from fedshift.data import ClientData, client_data, take
from fedshift.datasets import augment
from fedshift.datasets.augment import crop, draw, factors, jittered, photos, resized
from fedshift.errors import InputError
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.seeds import numpy_generator

SIZE = 12
kornia = pytest.importorskip("kornia", reason='needs kornia: pip install "fedshift[vision]"')


def images(n: int, size: int = SIZE) -> Tensor:
    """Smooth colourful bytes, uint8 [n, 3, size, size]."""
    source = numpy_generator(0, "augment test")
    coarse = torch.from_numpy(source.uniform(0, 255, (n, 3, 4, 4))).float()
    return nn.functional.interpolate(coarse, size=size, mode="bilinear").round().byte()


# --------------------------------------------------------------------------------------- the draws


def test_a_seed_gives_the_same_images_and_no_global_generator_is_used() -> None:
    x, before = images(6), torch.random.get_rng_state()
    first = photos(x, 3)
    torch.rand(5)
    assert torch.equal(photos(x, 3), first)
    assert not torch.equal(photos(x, 4), first)
    torch.random.set_rng_state(before)
    photos(x, 5)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_padding_rows_do_not_change_the_others() -> None:
    x = images(9)
    assert torch.equal(photos(x, 1)[:5], photos(x[:5], 1))
    assert not torch.equal(photos(x.flip(0), 1)[:5], photos(x[:5], 1))


def test_bytes_and_scaled_values_are_the_same_images() -> None:
    x = images(8)
    seen = photos(x, 0)
    scaled = photos(x.float() / 127.5 - 1, 0)
    assert seen.shape == x.shape
    assert seen.dtype == torch.float32
    assert seen.min() >= -1
    assert seen.max() <= 1
    assert float((seen - scaled).abs().max()) < 1e-5


def test_statistics_of_the_draws() -> None:
    n = 20_000
    u = draw(n, 0)

    def near(share: float, p: float) -> bool:
        return abs(share - p) < 4 * math.sqrt(p * (1 - p) / n)

    assert near(float((u.mirror < augment.MIRROR).double().mean()), 0.5)
    assert near(float((u.grey < augment.GREY).double().mean()), 0.1)
    by = factors(u.colour)
    assert float(by[:, :3].min()) == pytest.approx(0.7, abs=1e-3)
    assert float(by[:, :3].max()) == pytest.approx(1.3, abs=1e-3)
    assert by[:, :3].mean(0).tolist() == pytest.approx([1, 1, 1], abs=0.01)
    assert by[:, :3].std(0).tolist() == pytest.approx([0.6 / math.sqrt(12)] * 3, rel=0.02)
    assert float(by[:, 3].abs().max()) == pytest.approx(0.3 * 2 * math.pi, rel=1e-3)
    orders = u.order.argsort(1) @ torch.tensor([64, 16, 4, 1])
    counts = orders.unique(return_counts=True)[1]
    assert len(counts) == 24
    assert all(near(int(c) / n, 1 / 24) for c in counts)
    pairs = torch.corrcoef(torch.cat([u.colour, u.place, u.mirror[:, None]], 1).T)
    assert float((pairs - torch.eye(len(pairs))).abs().max()) < 0.03


def test_one_image_in_ten_is_grey_and_one_in_two_is_mirrored() -> None:
    ramp = torch.linspace(-0.5, 0.5, SIZE).expand(2000, 3, SIZE, SIZE).clone()
    ramp[:, 0] *= 0.2  # no channel like the others
    seen = photos(ramp, 0)
    grey = ((seen[:, 0] - seen[:, 1]).abs().amax((1, 2)) < 1e-6).double().mean()
    falling = (seen[:, 1, :, -1].mean(1) < seen[:, 1, :, 0].mean(1)).double().mean()
    assert abs(float(grey) - 0.1) < 4 * math.sqrt(0.09 / 2000)
    assert abs(float(falling) - 0.5) < 4 * math.sqrt(0.25 / 2000)


# ---------------------------------------------------------------------------------------- the crop


def torchvisions_box(box: np.ndarray, place: np.ndarray, size: int) -> tuple[int, ...]:
    """RandomResizedCrop.get_params step by step, from given uniform numbers."""
    for a, r in box:
        area = size * size * (0.7 + 0.3 * a)
        ratio = math.exp(math.log(3 / 4) + r * (math.log(4 / 3) - math.log(3 / 4)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= size and 0 < h <= size:
            return int(place[0] * (size - h + 1)), int(place[1] * (size - w + 1)), h, w
    return 0, 0, size, size


def test_boxes_are_torchvisions() -> None:
    size, u = 96, draw(500, 0)
    boxes = crop(u.box, u.place, size)
    pairs = zip(u.box.numpy(), u.place.numpy(), strict=True)
    wanted = [torchvisions_box(box, place, size) for box, place in pairs]
    assert boxes.tolist() == [list(box) for box in wanted]
    top, left, height, width = boxes.T
    share = height * width / size**2
    assert float(share.min()) > 0.68
    assert float(share.max()) <= 1.0
    assert float((top + height).max()) <= size
    assert float((left + width).max()) <= size
    assert len({tuple(b) for b in boxes.tolist()}) > 400


def test_where_no_try_fits_the_whole_image_is_taken() -> None:
    box = torch.ones(1, augment.TRIES, 2).double() * 0.999
    assert crop(box, torch.full((1, 2), 0.5).double(), 96).tolist() == [[0, 0, 96, 96]]
    box[0, -1] = torch.tensor([0.0, 0.5])
    assert crop(box, torch.zeros(1, 2).double(), 96).tolist() == [[0, 0, 80, 80]]


def test_resizing_is_pillows() -> None:
    """Bilinear in floats, of the box alone: `crop(...).resize(...)` and `mirror`."""
    pillow = pytest.importorskip("PIL.Image", reason="needs Pillow")
    x = torch.from_numpy(numpy_generator(1, "augment test").uniform(0, 1, (4, 3, SIZE, SIZE)))
    x = x.float()
    boxes = torch.tensor([[0, 0, SIZE, SIZE], [1, 2, 9, 10], [3, 0, 8, 12], [2, 1, 10, 7]])
    mirrored = torch.tensor([False, True, False, True])
    seen = resized(x, boxes, mirrored)
    assert torch.equal(seen[0], x[0])
    for i in range(4):
        top, left, height, width = boxes[i].tolist()
        for c in range(3):
            one = pillow.fromarray(x[i, c].numpy()).crop((left, top, left + width, top + height))
            one = one.resize((SIZE, SIZE), pillow.Resampling.BILINEAR)
            wanted = np.asarray(one)[:, ::-1] if mirrored[i] else np.asarray(one)
            assert float(np.abs(seen[i, c].numpy() - wanted).max()) < 1e-5


# ------------------------------------------------------------------------------------- the colours


def alone(k: int, x: Tensor, by: float) -> Tensor:
    """One of the four colour steps alone, the others with the factor that changes nothing."""
    factor = torch.tensor([[1.0, 1.0, 1.0, 0.0]]).repeat(len(x), 1)
    factor[:, k] = by
    return jittered(kornia, x, factor, torch.arange(4).repeat(len(x), 1))


@pytest.mark.parametrize(("k", "name"), [(0, "Brightness"), (1, "Contrast"), (2, "Color")])
@pytest.mark.parametrize("by", [0.7, 1.0, 1.3])
def test_colour_steps_are_pillows(k: int, name: str, by: float) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    enhance = pytest.importorskip("PIL.ImageEnhance")
    x = images(3)
    seen = alone(k, x.float() / 255, by) * 255
    for i in range(3):
        one = getattr(enhance, name)(image.fromarray(x[i].permute(1, 2, 0).numpy())).enhance(by)
        wanted = torch.from_numpy(np.asarray(one).copy()).permute(2, 0, 1)
        # Pillow rounds the mean, the grey values and the result to bytes.
        assert float((seen[i] - wanted).abs().max()) < 2.0
    if by != 1:
        assert float((seen - x).abs().max()) > 10


@pytest.mark.parametrize("circles", [-0.3, -0.1, 0.0, 0.25])
def test_the_hue_turns_as_in_colorsys(circles: float) -> None:
    x = images(2).float() / 255
    seen = alone(3, x, circles * 2 * math.pi)
    pixels, turned = (v.permute(0, 2, 3, 1).reshape(-1, 3).tolist() for v in (x, seen))
    for pixel, colour in zip(pixels, turned, strict=True):
        h, s, v = colorsys.rgb_to_hsv(*pixel)
        assert colour == pytest.approx(colorsys.hsv_to_rgb((h + circles) % 1, s, v), abs=1e-4)


def test_every_image_has_an_order_of_its_own() -> None:
    x, u = images(6).float() / 255, draw(6, 2)
    by, order = factors(u.colour), u.order.argsort(1)
    assert len({tuple(o) for o in order.tolist()}) > 3
    seen = jittered(kornia, x, by, order)
    for i in range(6):
        one = x[i : i + 1]
        for k in order[i].tolist():
            one = alone(k, one, float(by[i, k]))
        assert float((seen[i] - one[0]).abs().max()) < 1e-5
    assert float((jittered(kornia, x, by, order.flip(1)) - seen).abs().max()) > 0.01


@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (2, 3, 8, 9), (2, 24)])
def test_what_is_no_square_colour_image_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match='data.augment = "photos" is for square colour images'):
        photos(torch.zeros(shape), 0)


def test_without_kornia_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(augment, "import_module", absent)
    with pytest.raises(InputError, match=r"'kornia'\). Run `pip install \"fedshift\[vision\]\"`"):
        photos(images(1), 0)


# ----------------------------------------------------------------------------- where it is applied


@pytest.fixture
def net() -> Model:
    return build(lambda: Mlp((3, SIZE, SIZE), (), 4), seed=0)


@pytest.fixture
def client() -> ClientData:
    return client_data(images(20).float() / 127.5 - 1, torch.arange(20) % 4, 0)


def test_gradients_are_those_of_the_changed_batch(net: Model, client: ClientData) -> None:
    """grad at (photos(x, seed), y): labels, rows and weights stay; other seeds, other gradients."""
    local, (params, _) = Local(epochs=1, batch=7), net.init()
    plan = plan_all({"t": local}, client, 1, 0, 0)["t"]
    changed = replace(net, augment=photos)
    grads = []
    for s in range(plan.steps):
        batch = take(client, plan, s)
        result = gradient_of(changed, CrossEntropy(), {}, {}, batch, {})(params)
        by_hand = batch._replace(x=photos(batch.x, plan.seed + s))
        wanted = gradient_of(net, CrossEntropy(), {}, {}, by_hand, {})(params)
        assert all(torch.equal(result.grad[k], wanted.grad[k]) for k in params)
        plain = gradient_of(net, CrossEntropy(), {}, {}, batch, {})(params)
        assert not torch.equal(result.grad["head.weight"], plain.grad["head.weight"])
        grads.append(result.grad["head.weight"])
    assert not torch.equal(grads[0], grads[1])


def test_training_repeats_and_evaluation_is_untouched(net: Model, client: ClientData) -> None:
    local, (params, _) = Local(epochs=2, batch=7), net.init()
    changed = replace(net, augment=photos)

    def trained(model: Model, t: int = 1) -> Tensor:
        plan = plan_all({"t": local}, client, t, 0, 0)["t"]
        return local(model, CrossEntropy(), params, {}, {}, client, plan).params["head.weight"]

    assert torch.equal(trained(changed), trained(changed))
    assert not torch.equal(trained(changed), trained(net))
    assert torch.equal(changed(params, {}, client.x)["logits"], net(params, {}, client.x)["logits"])
    risk = plan_all({"risk": RISK}, client, 1, 0, 0)["risk"]
    losses = [mean_risk(m, CrossEntropy(), params, {}, {}, client, risk) for m in (changed, net)]
    assert losses[0] == losses[1]


def test_two_passes_of_one_step_see_the_same_images(net: Model, client: ClientData) -> None:
    """SAM's two gradients belong to one batch; SCAFFOLD's pass changes images as training does."""
    calls: list[int] = []

    def watched(x: Tensor, seed: int) -> Tensor:
        calls.append(seed)
        return photos(x, seed)

    model, (params, _) = replace(net, augment=watched), net.init()
    local = Local(epochs=1, batch=10, oracles=(Sam(0.05),))
    plan = plan_all({"t": local}, client, 1, 0, 0)["t"]
    local(model, CrossEntropy(), params, {}, {}, client, plan)
    assert calls == [plan.seed, plan.seed + 1]
    one = Local(epochs=1, batch=10)
    grads = pass_gradient(one, model, CrossEntropy(), params, {}, {}, client, plan)
    plain = pass_gradient(one, net, CrossEntropy(), params, {}, {}, client, plan)
    assert calls[2:] == calls[:2]
    assert not torch.equal(grads["head.weight"], plain["head.weight"])
