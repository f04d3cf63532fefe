"""Tables as hospitals have them, that are read for other than they are."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

import fedshift as fs
from fedshift.diagnose import diagnose
from fedshift.errors import FedshiftError
from fedshift.experiments.config.load import load_config

NAMES = {"client": "hospital", "label": "outcome"}


def patients(**columns: object) -> pd.DataFrame:
    """Forty patients of four hospitals; columns: others in place of these."""
    i = np.arange(40)
    table = {
        "hospital": np.array(["a", "b", "c", "d"])[i % 4],
        "age": 30 + i,
        "ward": np.array(["s", "m"])[i // 4 % 2],
        "outcome": np.array(["no", "yes"])[i // 2 % 2],
    }
    return pd.DataFrame(table | columns)


def read(frame: pd.DataFrame, judge: Callable[[fs.Task], str], more: str = "") -> str:
    """What comes of the frame as a CSV file, `more` behind it; hospital d is the target."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "patients.csv"
        path.write_text(frame.to_csv(index=False) + more)
        try:
            return judge(fs.Task.from_csv(path, **NAMES, target=frame.hospital[3]))
        except FedshiftError as e:
            return f"refused: {e}"


def noted(task: fs.Task, words: str) -> str:
    notes = " ".join(task.build().notes)
    return "right" if words in notes else f"silent: {task.classes} of {task.clients}"


def trap_zeros() -> str:
    """Clients "01" and "1" in a CSV file."""
    codes = np.array(["01", "1", "2", "3"])[np.arange(40) % 4]

    def judge(task: fs.Task) -> str:
        return "right" if "01" in task.clients else f"silent: the clients {task.clients}"

    return read(patients(hospital=codes), judge)


def trap_long_codes() -> str:
    """Labels that are codes of 18 digits"""
    codes = np.array([999000071000000100, 999000071000000101, 5])[np.arange(40) % 3]

    def judge(task: fs.Task) -> str:
        return "right" if len(task.classes) == 3 else f"silent: the classes {task.classes}"

    return read(patients(outcome=codes), judge)


def trap_case() -> str:
    """Labels "yes" and "Yes" for one thing"""
    words = np.array(["no", "yes", "Yes"])[np.arange(40) % 3]
    return read(patients(outcome=words), lambda task: noted(task, "differ by case"))


def trap_none() -> str:
    """A label called "None", of three"""
    words = np.array(["None", "mild", "severe"])[np.arange(40) % 3]
    return read(patients(outcome=words), lambda task: noted(task, '"None"'))


def trap_cut_off() -> str:
    """A file that was cut off in its last line, far down"""
    frame = pd.concat([patients()] * 8)[["hospital", "outcome", "age", "ward"]].reset_index()
    frame = frame.drop(columns="index")
    return read(frame, lambda task: f"silent: {len(task.places.codes)} rows", "a,no,4")


def trap_other_labels() -> str:
    """A test set with labels 0 and 1, clients with "no" and "yes\""""
    test = patients(outcome=np.arange(40) % 2).drop(columns="hospital")
    try:
        task = fs.Task.from_frame(patients(), **NAMES, target=test)
    except FedshiftError as e:
        return f"refused: {e}"
    return f"silent: the classes {task.classes}"


def trap_itself() -> str:
    """The table itself as the target's file"""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "patients.csv"
        patients().to_csv(path, index=False)
        try:
            task = fs.Task.from_csv(path, **NAMES, target=str(path))
        except FedshiftError as e:
            return f"refused: {e}"
        return f"silent: {len(task.build().task.test)} rows train and test"


def trap_other_categories() -> str:
    """Rows for prediction with a ward written in another way"""
    frame = patients()
    encoding = fs.Task.from_frame(frame, **NAMES, target="d").build().encoding
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        encoding.apply(frame.assign(ward=frame.ward.str.upper()))
    return "right" if any("ward" in str(one.message) for one in given) else 'silent: all "other"'


def trap_empty_experiment() -> str:
    """An experiment file without a key, as where saving failed"""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "f.toml"
        path.write_text("")
        try:
            return f"silent: {load_config(path).training.rounds} rounds on other data"
        except FedshiftError as e:
            return f"refused: {e}"


def trap_shares_for_counts() -> str:
    """Label shares of clients given to diagnose in place of counts"""
    try:
        chosen = diagnose([[0.3, 0.7], [0.8, 0.2]], [0.5, 0.5]).chosen
    except FedshiftError as e:
        return f"refused: {e}"
    return f"silent: an ESS of {chosen.ess:.0f} examples"
