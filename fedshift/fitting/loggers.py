"""Trackers of experiments, by their own libraries (extra `trackers`)."""

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
    """Scalars in event files under `folder`, a new folder per run.

    "plants-fedavg-seed0" is of the task "plants", a second run of the same "plants-fedavg-seed0-2";
    with fit(..., name="mine") it is "mine-seed0".

    Raises InputError where tensorboard is not installed.
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
        """One scalar per number."""
        for name, value in numbers.items():
            self._open[run].add_scalar(name, value, t)

    def finish(self) -> None:
        """Close all files."""
        for writer in self._open.values():
            writer.close()
        self._open.clear()


class MLflow:
    """Parameters and metrics of an MLflow run; a candidate of ess="auto" is a run within it.

    uri         the tracking server or store, MLflow's own setting if left out
    experiment  its name; left out: "fedshift"

    Raises InputError where mlflow is not installed.
    """

    def __init__(self, uri: str | None = None, experiment: str | None = None) -> None:
        self._library, self._runs = _library("mlflow", "MLflow"), dict[str, Any]()
        self._client = self._library.MlflowClient(tracking_uri=uri)
        self.experiment = experiment or "fedshift"

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """A new MLflow run with the configuration as its parameters."""
        client = self._client
        before = client.get_experiment_by_name(self.experiment)
        number = before.experiment_id if before else client.create_experiment(self.experiment)
        self._runs[run] = client.create_run(number, run_name=run).info.run_id
        for key, value in config.items():
            client.log_param(self._runs[run], key, value)

    def log(self, run: str, numbers: Mapping[str, float], t: int) -> None:
        """One metric per number."""
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

    Raises InputError where wandb is not installed.
    """

    def __init__(self, project: str = "fedshift", **options: Any) -> None:
        self._library, self._runs = _library("wandb", "WandB"), dict[str, Any]()
        self.project, self.options = project, options

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """A new run of the project."""
        options = {"group": run.partition(" ")[0], "reinit": "create_new", **self.options}
        self._runs[run] = self._library.init(
            project=self.project, name=run, config=dict(config), **options
        )

    def log(self, run: str, numbers: Mapping[str, float], t: int) -> None:
        """All numbers of a round."""
        self._runs[run].log(dict(numbers), step=t)

    def finish(self) -> None:
        """End the runs."""
        for run in self._runs.values():
            run.finish()
        self._runs.clear()


def _name_folder(run: str, config: Mapping[str, Any]) -> str:
    """Run, method and seed; without the method where the user named the run."""
    parts = [run, f"seed{config.get('seeds.run', 0)}"]
    # Left out, a run's name is the task's, which all methods have.
    if config.get("name") == file_name(str(config.get("data.name"))):
        parts.insert(1, str(config.get("method.name")))
    return "-".join(map(slug, parts))


def _new_folder(parent: Path, name: str) -> Path:
    """parent/NAME, or NAME-2, NAME-3, ...: event files of two runs in one would be one curve."""
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
    """As MLflow names metrics."""
    return re.sub(r"[^\w\-. /]", "_", name)
