"""Files that are read for other than they are."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedshift.cli.app import app
from fedshift.cli.ending import perform
from fedshift.csv_counts import read_counts, read_target
from fedshift.datasets import Wanted, writers
from fedshift.datasets.images import Folder, Images, decode, decode_once, read_table
from fedshift.errors import FedshiftError
from fedshift.experiments.config.load import load_config
from fedshift_papers.datasets import fedpals_clients, pacs, retina


def answer(use: Callable[[Path], str]) -> str:
    """What becomes of a use in a folder of its own; the use says "right" or what is silent."""
    with tempfile.TemporaryDirectory() as place:
        try:
            return use(Path(place))
        except FedshiftError as e:
            return f"refused: {e}"
        except Exception as e:
            return f"raw: {type(e).__name__}"


def judged(right: bool, wrong: str) -> str:
    return "right" if right else f"silent: {wrong}"


def pixels(place: Path, size: int) -> np.ndarray[Any, Any]:
    """Image a.png of a folder: [3, size, size]."""
    images = Images(Folder(place), ("a.png",), ("row 1",))
    return decode(images, np.array([0]), size)[0].numpy()


def trap_16_bits() -> str:
    """A grey PNG of 16 bits."""

    def use(place: Path) -> str:
        ramp = np.linspace(0, 65535, 64).reshape(8, 8).astype(np.uint16)
        Image.fromarray(ramp).save(place / "a.png")
        mean = pixels(place, 8).mean()
        return judged(100 < mean < 150, f"clipped to white, mean {mean:.0f} of 255")

    return answer(use)


def trap_orientation() -> str:
    """A photograph taken with the camera upside down."""

    def use(place: Path) -> str:
        exif = Image.Exif()
        exif[0x0112] = 3
        stored = np.zeros((4, 4), np.uint8)
        stored[0] = 255
        Image.fromarray(stored).save(place / "a.png", exif=exif)
        return judged(pixels(place, 4)[0, 3, 0] == 255, "learned upside down")

    return answer(use)


def tree(place: Path) -> Path:
    """RETINA with two images of each class and part of every site."""
    for site in ("kaggle_arima", "RIM", "REFUGE"):
        for part in ("Training", "Testing"):
            for name in ("Normal", "Glaucoma"):
                folder = place / site / part / name
                folder.mkdir(parents=True)
                for k in range(2):
                    Image.new("RGB", (4, 4)).save(folder / f"{k}.png")
    return place


def half(place: Path) -> Path:
    """The part of a site that is put elsewhere."""
    return place / "RIM" / "Testing"


def trap_linked_folder() -> str:
    """Half of a hospital's images on another disk, behind a link."""

    def use(place: Path) -> str:
        whole = len(retina.scan(tree(place / "retina")).y)
        half(place / "retina").rename(place / "disk")
        half(place / "retina").symlink_to(place / "disk")
        count = len(retina.scan(place / "retina").y)
        return judged(count == whole, f"{count} of {whole} images")

    return answer(use)


def trap_link_to_nothing() -> str:
    """The other disk is not mounted."""

    def use(place: Path) -> str:
        tree(place / "retina")
        half(place / "retina").rename(place / "disk")
        half(place / "retina").symlink_to(place / "gone")
        return judged(len(retina.scan(place / "retina").y) == 24, "20 of 24 images")

    return answer(use)


def trap_link_in_archive() -> str:
    """A tar archive of a tree one folder of which is a link."""

    def use(place: Path) -> str:
        tree(place / "retina")
        half(place / "retina").rename(place / "retina" / "moved")
        half(place / "retina").symlink_to(Path("..") / "moved")
        with tarfile.open(place / "retina.tar", "w") as tar:
            tar.add(place / "retina", arcname="retina")
        count = len(retina.scan(place / "retina.tar").y)
        return judged(count == 24, f"{count} of 24 images")

    return answer(use)


def trap_hard_link_in_archive() -> str:
    """A tar archive of images of which two are one file on the disk."""

    def use(place: Path) -> str:
        one = tree(place / "retina") / "RIM" / "Testing" / "Normal"
        (one / "2.png").hardlink_to(one / "1.png")
        with tarfile.open(place / "retina.tar", "w") as tar:
            tar.add(place / "retina", arcname="retina")
        count = len(retina.scan(place / "retina.tar").y)
        return judged(count == 25, f"{count} of 25 images")

    return answer(use)


def trap_other_format() -> str:
    """A hospital whose scans are TIFF files in part."""

    def use(place: Path) -> str:
        folder = tree(place) / "RIM" / "Testing" / "Normal"
        Image.new("RGB", (4, 4)).save(folder / "9.tif")
        count = len(retina.scan(place).y)
        return judged(count == 25, f"{count} of 25 images")

    return answer(use)


def wildcam(place: Path) -> Path:
    """An iWildCam of eight images."""
    (place / "train").mkdir(parents=True)
    lines = ["split,location_remapped,sequence_remapped,y,filename"]
    for j in range(8):
        split = {6: "val", 7: "test"}.get(j, "train")
        lines.append(f"{split},{j},{j},{j % 2},{j}.png")
        Image.new("RGB", (4, 4)).save(place / "train" / f"{j}.png")
    (place / "metadata.csv").write_text("\n".join(lines) + "\n")
    (place / "categories.csv").write_text("y,name\n0,fox\n1,owl\n")
    return place


@contextlib.contextmanager
def searched(place: Path) -> Iterator[None]:
    """Data sets and decoded files are looked for here alone."""
    before = dict(os.environ)
    os.environ.update(FEDSHIFT_DATA=str(place), XDG_CACHE_HOME=str(place / "cache"))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def trap_incomplete_wildcam() -> str:
    """An iWildCam of which most was not downloaded."""

    def use(place: Path) -> str:
        wildcam(place / "iwildcam_v2.0")
        with searched(place):
            data = fedpals_clients.iwildcam_clients(Wanted(2, 0, size=4)).data
        return f"silent: a task of {len(data.train)} images, the set has 144,770"

    return answer(use)


def trap_other_folder_same_names() -> str:
    """Another copy of the images, under the same names."""

    def use(place: Path) -> str:
        shades = []
        for name, shade in (("a", 10), ("b", 200)):
            (place / name).mkdir()
            Image.new("L", (2, 2), shade).save(place / name / "x.png")
            images = Images(Folder(place / name), ("x.png",), ("row 1",))
            shades.append(int(decode_once(images, np.array([0]), 2, place / "cache").max()))
        return judged(shades == [10, 200], "the first copy's pixels for the second")

    return answer(use)


def leaf(place: Path, changed: Callable[[dict[str, Any]], None], copy: bool = False) -> str:
    """FEMNIST of one writer of three digits; what is silent about a change of the training file."""
    for part in ("train", "test"):
        x = np.linspace(0, 1, 3 * 784).reshape(3, 784).tolist()
        content = {"users": ["a"], "num_samples": [3], "user_data": {"a": {"x": x, "y": [1, 2, 3]}}}
        if part == "train":
            changed(content)
        (place / part).mkdir()
        for k in range(1 + (copy and part == "train")):
            (place / part / f"all_data_{k}.json").write_text(json.dumps(content))
    train, test = writers.leaf(place)
    same = len(train.y) == 3 and bool((train.x == test.x).all())
    return judged(same, f"{len(train.y)} images, other than the three of the writer")


def trap_leaf_doubled_user() -> str:
    """A LEAF file that lists a user twice."""

    def change(content: dict[str, Any]) -> None:
        content["users"], content["num_samples"] = ["a", "a"], [3, 3]

    return answer(lambda place: leaf(place, change).replace("right", "silent: one was dropped"))


def trap_leaf_user_in_two_files() -> str:
    """Files of two runs of LEAF's preprocessing in one folder."""
    return answer(lambda place: leaf(place, lambda content: None, copy=True))


def trap_leaf_unlisted_user() -> str:
    """A LEAF file with data of a user that it does not list."""

    def change(content: dict[str, Any]) -> None:
        content["user_data"]["b"] = content["user_data"]["a"]

    return answer(lambda place: leaf(place, change).replace("right", "silent: one was left out"))


def trap_leaf_packed_file() -> str:
    """LEAF's files of which one is still packed."""

    def use(place: Path) -> str:
        leaf(place, lambda content: None)
        (place / "train" / "all_data_1.json.gz").write_bytes(b"")
        return f"silent: {len(writers.leaf(place)[0].y)} images, without those of the packed file"

    return answer(use)


def trap_leaf_turned() -> str:
    """A LEAF file whose x is stored by pixel, not by image."""

    def change(content: dict[str, Any]) -> None:
        user = content["user_data"]["a"]
        user["x"] = np.array(user["x"]).T.tolist()

    return answer(lambda place: leaf(place, change))


def trap_mat_turned() -> str:
    """EMNIST's .mat saved again with an image in each column."""
    from scipy.io import savemat

    def use(place: Path) -> str:
        images = np.repeat(np.arange(6, dtype=np.uint8)[:, None], 784, axis=1)
        one = {"images": images.T, "labels": np.zeros((6, 1)), "writers": np.zeros((6, 1))}
        savemat(place / "emnist-digits.mat", {"dataset": {"train": one, "test": one}})
        x = writers.emnist(place)[0].x
        return judged(bool((x[3] == 3).all()), "images mixed of all others")

    return answer(use)


def trap_column_twice() -> str:
    """A table with two columns of one name."""

    def use(place: Path) -> str:
        read = read_table(b"y,name,y\n1,fox,2\n", place, ("y", "name"))
        return f"silent: the last, {read['y'][0]}"

    return answer(use)


def trap_comma_in_a_cell() -> str:
    """A table with a comma in a name without quotes."""

    def use(place: Path) -> str:
        read = read_table(b"name,y,split\nfox, red,1,train\n", place, ("split", "y"))
        return f"silent: y is {read['y'][0]!r}, split is {read['split'][0]!r}"

    return answer(use)


def trap_index_of_pandas() -> str:
    """Label counts and a target that pandas read and wrote again, with its index."""

    def use(place: Path) -> str:
        (place / "c.csv").write_text("Unnamed: 0,cat,dog\n0,3,0\n1,0,3\n")
        (place / "t.csv").write_text("Unnamed: 0,cat,dog\n0,0.5,0.5\n")
        counts = read_counts(place / "c.csv")
        read_target(place / "t.csv", counts.classes)
        return judged(len(counts.classes) == 2, f"labels {', '.join(counts.classes)}")

    return answer(use)


def trap_two_tables() -> str:
    """PACS with two tables that say different things."""

    def use(place: Path) -> str:
        (place / "photo" / "dog").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(place / "photo" / "dog" / "a.png")
        (place / "old").mkdir()
        for name, split in (("metadata.csv", "test"), ("old/metadata.csv", "train")):
            (place / name).write_text(f"split,domain,y,path\n{split},photo,0,photo/dog/a.png\n")
        return f"silent: {len(pacs.scan(place).rows('test'))} test image, by one of the two"

    return answer(use)


def trap_line_of_a_mistake() -> str:
    """A mistake under a header that has a comment behind it."""

    def use(place: Path) -> str:
        path = place / "f.toml"
        path.write_text('[training]  # local work\nrounds = "two"\n')
        try:
            load_config(path)
        except FedshiftError as e:
            return judged(f"{path}:2: " in str(e), "the line is not told")
        return "silent: accepted"

    return answer(use)


def trap_names_obeyed() -> str:
    """Names of labels that hold escape sequences and markup, in a diagnosis."""

    def use(place: Path) -> str:
        counts, target = place / "c.csv", place / "t.csv"
        counts.write_text("client,\x1b[31mcat,[red]dog\na,3,0\nb,0,3\n")
        target.write_text("\x1b[31mcat,[red]dog\n0.5,0.5\n")
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            perform(app, ["diagnose", "--counts", str(counts), "--target", str(target)])
        shown = "\x1b" not in out.getvalue() and "[red]dog" in out.getvalue()
        return judged(shown, "the terminal obeys them")

    return answer(use)


if __name__ == "__main__":
    for name, trap in list(globals().items()):
        if name.startswith("trap_"):
            print(f"{name}: {trap()[:150]}")
