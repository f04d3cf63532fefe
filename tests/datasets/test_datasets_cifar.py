"""Reading CIFAR batches and mosaics; hostile pickles; every way in which they can be wrong."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshift.datasets import cifar, load, safe_pickle
from fedshift.errors import DataError
from support.dataset_fixtures import Touch, refuses, write_batch, write_cifar_batches, write_mosaic

RNG_IMAGES = np.random.default_rng(5).integers(0, 256, (8, 3, 32, 32)).astype(np.uint8)


# --------------------------------------------------------------------------------- CIFAR batches


def test_batches_give_pixels_by_channel_and_keep_their_order(tmp_path: Path) -> None:
    labels = [9, 0, 1, 2, 3, 4, 5, 6]
    train, test = cifar.read(write_cifar_batches(tmp_path, RNG_IMAGES, labels))
    assert train.x.shape == (40, 3, 32, 32)
    assert torch.equal(test.x, torch.from_numpy(RNG_IMAGES))
    assert torch.equal(train.x[8:16], test.x)
    assert test.y.tolist() == labels
    # The channel order is the file's: 1,024 red values first.
    assert torch.equal(test.x[0, 0].flatten(), torch.from_numpy(RNG_IMAGES[0].ravel()[:1024]))


def test_python_2_spelling_and_fortran_order(tmp_path: Path) -> None:
    # As Python 2 wrote it: SHORT_BINSTRING keys and values, numpy.core, opcodes spelled out.
    raw = bytes(range(256)) * 12
    stream = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\n"
        b"q\x04K\x00\x85q\x05U\x01bq\x06\x87q\x07Rq\x08(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x09"
        b"U\x02u1K\x00K\x01\x87q\nRq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + len(raw).to_bytes(4, "little") + raw + b"tbU\x06labelsq\x0c]q\rK\x07au."
    )
    path = tmp_path / "batch"
    path.write_bytes(stream)
    batch = cifar.read_batch(path)
    assert batch.y.tolist() == [7]
    assert batch.x.flatten().tolist() == list(raw)
    images = np.asfortranarray(RNG_IMAGES.reshape(8, -1))
    path.write_bytes(pickle.dumps({b"data": images, b"labels": [0] * 8}, protocol=2))
    assert torch.equal(cifar.read_batch(path).x, torch.from_numpy(RNG_IMAGES))


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    path, witness = tmp_path / "data_batch_1", tmp_path / "witness"
    content = pickle.dumps({b"data": Touch(witness), b"labels": [0]}, protocol=protocol)
    path.write_bytes(content)
    with refuses(path, "Nothing was run") as caught:
        cifar.read_batch(path)
    assert re.search(r"asks for (pathlib\S*|__builtin__)\.\w+", str(caught.value))
    assert not witness.exists()
    # Control: the same bytes do act when nothing restrains them.
    pickle.loads(content)  # noqa: S301
    assert witness.exists()


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "asks for os.system"),
        (b"c__builtin__\neval\n.", "asks for __builtin__.eval"),
        (b"cnumpy\nload\n.", "asks for numpy.load"),
        (b"\x80\x04\x8c\x0cnumpy.ctypes\x8c\x04load\x93.", "asks for numpy.ctypes.load"),
        (b"\x80\x02c_codecs\nencode\nX\x01\0\0\0aX\x03\0\0\0bz2\x86R.", "encoded with 'bz2'"),
        (b"cnumpy\ndtype\n(S'O8'\ntR.", "an array of type b'O8'; allowed: 'u1'"),
        (b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\ndtype\ntR.", "other than numpy.ndarray"),
        (b"cnumpy\nndarray\n)R(K\x01K\x05S''\ntb.", "is not that of plain unsigned bytes"),
        (b"(dp0\n", "not a complete pickle (ValueError: pickle exhausted"),
        (b"\xff\xfe", r"not a complete pickle (ValueError: at position 0, opcode b'\xff' unknown"),
        (b"Ppersistent\n.", "not a complete pickle (UnpicklingError"),
        (b"", "not a complete pickle (ValueError: pickle exhausted"),
        (b"\x80\x05\x96\x01" + bytes(8) + b".", "opcode BYTEARRAY8 of pickle protocol 5 at byte 2"),
        (b"\x80\x02\x96" + b"y" * 9 + b".", "not a complete pickle ("),
    ],
)
def test_forbidden_and_broken_pickles(tmp_path: Path, stream: bytes, message: str) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(stream)
    with refuses(path, message):
        safe_pickle.load(path)


def forged_array(shape: str, raw: bytes) -> bytes:
    return (
        b"\x80\x02cnumpy\nndarray\n)R(K\x01" + shape.encode("latin1") + b"cnumpy\ndtype\n"
        b"U\x02u1\x85R\x89U" + bytes([len(raw)]) + raw + b"tb."
    )


def test_forged_shapes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(forged_array("K\x02K\x02\x86", b"abcd"))
    assert safe_pickle.load(path).values().tolist() == [[97, 98], [99, 100]]
    path.write_bytes(forged_array("J\xff\xff\xff\x7fK\x02\x86", b"abcd"))
    with refuses(path, "an array of shape [2147483647, 2] comes with 4 bytes"):
        safe_pickle.load(path)
    path.write_bytes(forged_array("J\xfe\xff\xff\xffJ\xfe\xff\xff\xff\x86", b"abcd"))
    with refuses(path, "impossible shape (-2, -2)"):
        safe_pickle.load(path)


FLAT = RNG_IMAGES.reshape(8, -1)
BATCH_CASES: dict[str, tuple[Any, str]] = {
    "list": ([1], "holds a list, expected a dict with b'data', b'labels'"),
    "keys": (
        {b"data": FLAT, b"fine_labels": [0] * 8},
        "a dict with the keys b'data', b'fine_labels', expected a dict with b'data', b'labels'",
    ),
    "text keys": ({"data": FLAT, "labels": [0]}, "the keys 'data', 'labels', expected"),
    "data type": ({b"data": [1], b"labels": [0]}, "b'data' is list, expected bytes of shape"),
    "data shape": ({b"data": FLAT[:, 1:], b"labels": [0] * 8}, "b'data' is [8, 3071], expected"),
    "floats": ({b"data": FLAT / 255, b"labels": [0] * 8}, "an array of type 'f8'; allowed: 'u1'"),
    "count": ({b"data": FLAT, b"labels": [0] * 7}, "7 labels for 8 images"),
    "label": ({b"data": FLAT, b"labels": [0] * 7 + [10]}, "label 10; allowed: 0 to 9"),
    "negative": ({b"data": FLAT, b"labels": [0] * 7 + [-1]}, "label -1; allowed: 0 to 9"),
    "labels": ({b"data": FLAT, b"labels": b"\0" * 8}, "b'labels' is a bytes, expected a list"),
}


@pytest.mark.parametrize("case", BATCH_CASES)
def test_damaged_batches_are_refused(tmp_path: Path, case: str) -> None:
    content, message = BATCH_CASES[case]
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(content, protocol=2))
    with refuses(path, message):
        cifar.read_batch(path)


def test_truncated_missing_and_oversized_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_batch(tmp_path / "data_batch_1", RNG_IMAGES, [0] * 8)
    path.write_bytes(path.read_bytes()[:-100])
    with refuses(path, "not a complete pickle"):
        cifar.read_batch(path)
    with refuses(tmp_path / "none", "cannot be read (No such file or directory)"):
        cifar.read_batch(tmp_path / "none")
    monkeypatch.setattr(safe_pickle, "LARGEST", 1000)
    with refuses(path, "allowed: at most 1,000"):
        cifar.read_batch(path)


# --------------------------------------------------------------------------------------- mosaics


@pytest.mark.parametrize("ending", [".webp", ".png"])
def test_mosaics_and_batches_hold_the_same_examples(tmp_path: Path, ending: str) -> None:
    labels = [1, 0, 1, 0, 1, 0, 1, 0]
    for part in ("train", "test"):
        for label, name in enumerate(cifar.CLASSES[:2]):
            images = RNG_IMAGES[1 - label :: 2]
            write_mosaic(tmp_path / "m" / part / f"{name}_0{ending}", images, across=2)
    mosaic = cifar.read(tmp_path / "m")[1]
    batch = cifar.read(write_cifar_batches(tmp_path / "b", RNG_IMAGES, labels))[1]
    assert mosaic.y.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    order = batch.y.argsort(stable=True)
    assert torch.equal(mosaic.x, batch.x[order])
    assert not torch.equal(mosaic.x, batch.x)


def test_mosaics_come_by_class_then_by_number(tmp_path: Path) -> None:
    for k, name in enumerate(("cat_10", "cat_2", "bird_0")):
        write_mosaic(tmp_path / f"{name}.png", RNG_IMAGES[k : k + 1], across=1)
    samples = cifar.read_mosaics(tmp_path)
    assert samples.y.tolist() == [2, 3, 3]
    assert torch.equal(samples.x, torch.from_numpy(RNG_IMAGES[[2, 1, 0]]))


def test_mosaics_without_pillow_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_mosaic(tmp_path / "cat_0.png", RNG_IMAGES, across=4)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with refuses(path, 'Pillow, which is not installed. Run `pip install "fedshift[vision]"`'):
        cifar.read_mosaics(tmp_path)


def test_damaged_mosaics_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses(tmp_path, "no mosaics; expected files such as airplane_0.webp"):
        cifar.read_mosaics(tmp_path)
    path = write_mosaic(tmp_path / "cat_0.png", RNG_IMAGES, across=4)
    whole = path.read_bytes()
    for content in (b"", b"no image", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with refuses(path, "not a readable WebP or PNG image"):
            cifar.read_mosaics(tmp_path)
    path.write_bytes(whole)
    monkeypatch.setattr(cifar, "MOST_TILES", 7)
    with refuses(path, "128 x 64 pixels; both sides must be multiples of 32, with at most 7"):
        cifar.read_mosaics(tmp_path)
    path.rename(tmp_path / "cart_0.png")
    with refuses(tmp_path / "cart_0.png", 'Did you mean "cat"? Rename the file'):
        cifar.read_mosaics(tmp_path)


def test_mosaic_with_odd_sides_is_refused(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (64, 33)).save(tmp_path / "cat_0.png")
    with refuses(tmp_path / "cat_0.png", "64 x 33 pixels; both sides must be multiples of 32"):
        cifar.read_mosaics(tmp_path)


# ------------------------------------------------------------------------------ loading CIFAR-10


def test_load_refuses_a_part_of_cifar_10(tmp_path: Path) -> None:
    write_cifar_batches(tmp_path / "cifar-10-batches-py", RNG_IMAGES, [0] * 8)
    with pytest.raises(DataError, match=r"40 training examples; cifar-10 has 50,000\. Replace"):
        load("cifar-10", folders=[tmp_path])
    (tmp_path / "cifar-10-batches-py" / "test_batch").unlink()
    with pytest.raises(DataError, match="cifar-10-batches-py is incomplete: it lacks test_batch"):
        load("cifar-10", folders=[tmp_path])


def test_whole_mosaics_are_read_beside_a_part_of_the_batches(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_mosaic(tmp_path / part / "cat_0.PNG", RNG_IMAGES)
    write_batch(tmp_path / "data_batch_1", RNG_IMAGES[:4], [0] * 4)
    assert cifar.missing(tmp_path) == ()
    assert cifar.read(tmp_path)[0].y.tolist() == [3] * 8
    write_cifar_batches(tmp_path, RNG_IMAGES, [0] * 8)
    assert cifar.read(tmp_path)[1].y.tolist() == [0] * 8


@pytest.mark.slow
def test_load_takes_full_batches_and_checks_the_classes(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    images = np.zeros((10_000, 3, 32, 32), dtype=np.uint8)
    write_cifar_batches(folder, images, [j % 10 for j in range(10_000)])
    assert load("cifar-10", folders=[tmp_path]).test.y.bincount().tolist() == [1000] * 10
    write_batch(folder / "test_batch", images, [j % 9 for j in range(10_000)])
    with pytest.raises(DataError, match="1,000 test examples of every class, but not here of air"):
        load("cifar-10", folders=[tmp_path])
