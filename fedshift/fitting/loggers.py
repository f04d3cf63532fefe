"""Trackers of experiments, through their own libraries (extra `trackers`)."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshift.errors import InputError
from fedshift.experiments.folder.progress import slug
from fedshift.fitting.planning import file_name


def _library(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise InputError(
            f'fs.{what} needs {name.partition(".")[0]}: pip install "fedshift[trackers]" ({e})'
        ) from None


class TensorBoard:
    """Scalars in event files under `folder`, in a new folder for each run.

    A run on the task "plants" has the folder "plants-fedavg-seed0", and a second run of the same
    "plants-fedavg-seed0-2". With fit(..., name="mine") it is "mine-seed0".

    Raises InputError if tensorboard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder, self._open = Path(folder), dict[str, Any]()
        _library("tensorboard", "TensorBoard")
        self._library = _library("torch.utils.tensorboard", "TensorBoard")

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """Open the run's event file, with its configuration as text."""
        place = _new_folder(self.folder, _name_folder(run, config))
        self._open[run] = self._library.SummaryWriter(str(place))
        lines = "\n".join(f"    {key} = {value}" for key, value in config.items())
        self._open[run].add_text("configuration", lines)

    def log(self, run: str, numbers: Mapping[str, float], t: int) -> None:
        """Write a scalar for each number."""
        for name, value in numbers.items():
            self._open[run].add_scalar(name, value, t)

    def finish(self) -> None:
        """Close all files."""
        for writer in self._open.values():
            writer.close()
        self._open.clear()


class MLflow:
    """Parameters and metrics of an MLflow run; a candidate of ess="auto" is a run within it.

    uri         the tracking server or store; by default MLflow's own setting
    experiment  its name; by default "fedshift"

    Raises InputError if mlflow is not installed.
    """

    def __init__(self, uri: str | None = None, experiment: str | None = None) -> None:
        self._library, self._runs = _library("mlflow", "MLflow"), dict[str, Any]()
        self._client = self._library.MlflowClient(tracking_uri=uri)
        self.experiment = experiment or "fedshift"

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """Begin an MLflow run with the configuration as its parameters."""
        client = self._client
        before = client.get_experiment_by_name(self.experiment)
        number = before.experiment_id if before else client.create_experiment(self.experiment)
        self._runs[run] = client.create_run(number, run_name=run).info.run_id
        for key, value in config.items():
            client.log_param(self._runs[run], key, value)

    def log(self, run: str, numbers: Mapping[str, float], t: int) -> None:
        """Log a metric for each number."""
        for name, value in numbers.items():
            self._client.log_metric(self._runs[run], _plain(name), value, step=t)

    def finish(self) -> None:
        """End the MLflow runs."""
        for number in self._runs.values():
            self._client.set_terminated(number)
        self._runs.clear()


class WandB:
    """A Weights & Biases run for each run; candidates of ess="auto" share a group.

    project  its name
    options  further arguments of `wandb.init`, such as mode="offline"

    Raises InputError if wandb is not installed.
    """

    def __init__(self, project: str = "fedshift", **options: Any) -> None:
        self._library, self._runs = _library("wandb", "WandB"), dict[str, Any]()
        self.project, self.options = project, options

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """Begin a run of the project."""
        options = {"group": run.partition(" ")[0], "reinit": "create_new", **self.options}
        self._runs[run] = self._library.init(
            project=self.project, name=run, config=dict(config), **options
        )

    def log(self, run: str, numbers: Mapping[str, float], t: int) -> None:
        """Log all numbers of a round."""
        self._runs[run].log(dict(numbers), step=t)

    def finish(self) -> None:
        """End the runs."""
        for run in self._runs.values():
            run.finish()
        self._runs.clear()


def _name_folder(run: str, config: Mapping[str, Any]) -> str:
    """The name of a run's folder: run, method and seed; no method if the user named the run."""
    parts = [run, f"seed{config.get('seeds.run', 0)}"]
    # By default a run has the task's name, which does not tell methods apart.
    if config.get("name") == file_name(str(config.get("data.name"))):
        parts.insert(1, str(config.get("method.name")))
    return "-".join(map(slug, parts))


def _new_folder(parent: Path, name: str) -> Path:
    """parent/NAME, or NAME-2, NAME-3, ...: TensorBoard draws two runs in a folder as one curve."""
    place, number = parent / name, 1
    while True:
        try:
            place.mkdir(parents=True)
        except FileExistsError:
            number += 1
            place = parent / f"{name}-{number}"
        except OSError as e:
            raise InputError(f"fs.TensorBoard: {place}: cannot be created: {e.strerror}") from None
        else:
            return place


def _plain(name: str) -> str:
    """The name without characters that MLflow refuses in names of metrics."""
    return re.sub(r"[^\w\-. /]", "_", name)
