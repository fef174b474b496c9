"""Experiment trackers as sinks, each on a package that is installed apart, under the names of `metrics.jsonl`.

    Trainer(sinks=[TensorBoardSink("runs/tb"), "wandb"])

None of them needs an account or a network.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentlightning.arguments import nearest
from agentlightning.errors import ConfigError
from agentlightning.metrics.sink import Sink
from agentlightning.types import Run


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among a step's metrics; truth values, texts and lists are none."""
    found = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _missing(package: str) -> ConfigError:
    return ConfigError(f"This sink needs the package '{package}': pip install {package}.")


class TensorBoardSink(Sink):
    """Scalars for `tensorboard --logdir FOLDER`, a folder per run. Needs `tensorboard`."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from tensorboard.summary import Writer  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise _missing("tensorboard") from None
        self._make, self._folder, self._writer = Writer, Path(folder), None

    def start(self, run: Run) -> None:
        self._writer = self._make(str(self._folder / run.run_id))

    def step(self, metrics: Mapping[str, Any]) -> None:
        assert self._writer is not None
        step = int(metrics["step"])
        for name, value in numbers(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbSink(Sink):
    """A Weights & Biases run, offline unless `mode` or WANDB_MODE says otherwise: `wandb sync` sends it later.

    Needs `wandb`.
    """

    def __init__(
        self,
        project: str = "agentlightning",
        *,
        mode: str | None = None,
        folder: str | Path = ".",
        name: str | None = None,
        entity: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        """`name`: what the run is called there; its id if not given. `entity`: the user or team that it is sent to."""
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise _missing("wandb") from None
        self._wandb: Any = wandb
        mode = mode or os.environ.get("WANDB_MODE") or "offline"
        self._name = name
        self._given: dict[str, Any] = {"project": project, "mode": mode, "dir": str(folder)}
        self._given |= {"entity": entity, "tags": list(tags)} if entity or tags else {}
        self._run: Any = None

    def start(self, run: Run) -> None:
        self._run = self._wandb.init(
            id=run.run_id, name=self._name or run.run_id, config=dict(run.settings), **self._given
        )

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._run.log(numbers(metrics), step=int(metrics["step"]))

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class MLflowSink(Sink):
    """An MLflow run in a local folder or at a tracking server's URL. Needs `mlflow` or `mlflow-skinny`."""

    def __init__(self, uri: str, experiment: str = "agentlightning") -> None:
        try:
            from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise _missing("mlflow") from None
        self._client: Any = MlflowClient(tracking_uri=uri)
        self._experiment = experiment
        self._run_id: str | None = None

    def start(self, run: Run) -> None:
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(self._experiment)
        self._run_id = self._client.create_run(experiment, run_name=run.run_id).info.run_id
        for name, value in run.settings.items():
            self._client.log_param(self._run_id, name, str(value)[:500])

    def step(self, metrics: Mapping[str, Any]) -> None:
        for name, value in numbers(metrics).items():
            self._client.log_metric(self._run_id, name.replace("@", "_at_"), value, step=int(metrics["step"]))

    def close(self) -> None:
        if self._run_id is not None:
            self._client.set_terminated(self._run_id)


class TrackioSink(Sink):
    """A trackio run, kept on this machine: `trackio show` opens it. Needs `trackio`."""

    def __init__(self, project: str = "agentlightning") -> None:
        try:
            import trackio  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise _missing("trackio") from None
        self._trackio: Any = trackio
        self._project = project
        self._begun = False

    def start(self, run: Run) -> None:
        self._trackio.init(project=self._project, name=run.run_id, config=dict(run.settings))
        self._begun = True

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._trackio.log(numbers(metrics), step=int(metrics["step"]))

    def close(self) -> None:
        if self._begun:
            self._trackio.finish()


class RaySink(Sink):
    """Gauges among the metrics of Ray itself, which Prometheus collects from a cluster's machines: `reward` becomes
    `ray_agentlightning_reward`, tagged with the run's folder and id. Needs `ray`, and a run on a cluster."""

    def __init__(self) -> None:
        try:
            import ray  # pyright: ignore[reportMissingImports]
            from ray.util.metrics import Gauge  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise _missing("ray") from None
        self._ray: Any = ray
        self._gauge: Any = Gauge
        self._gauges: dict[str, Any] = {}
        self._tags: dict[str, str] = {}

    def start(self, run: Run) -> None:
        self._tags = {"run": Path(str(run.state.get("run_dir") or run.run_id)).name, "run_id": run.run_id}

    def step(self, metrics: Mapping[str, Any]) -> None:
        if not self._gauges:
            self._check()
        for name, value in numbers(metrics).items():
            known = re.sub(r"\W", "_", f"agentlightning_{name}")
            if known not in self._gauges:
                self._gauges[known] = self._gauge(known, description=name, tag_keys=tuple(self._tags))
            self._gauges[known].set(value, tags=self._tags)

    def _check(self) -> None:
        if not self._ray.is_initialized():
            raise ConfigError("The sink 'ray' needs a run on a cluster: backend='ray', or ray.init() before it.")
        here = self._ray.get_runtime_context().get_node_id()
        if any(node["MetricsExportPort"] < 0 for node in self._ray.nodes() if node["NodeID"] == here):
            raise ConfigError("This cluster collects no metrics: pip install 'ray[default]' on its machines.")


TRACKERS: Mapping[str, Callable[[str], Sink]] = {
    "tensorboard": lambda project: TensorBoardSink(os.environ.get("TENSORBOARD_DIR") or Path("tensorboard", project)),
    "wandb": lambda project: WandbSink(project),
    "mlflow": lambda project: MLflowSink(os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db", project),
    "trackio": lambda project: TrackioSink(project),
    "ray": lambda project: RaySink(),
}
"""Trackers by name, each for a project; where they write is what their own variables of the environment say."""


_WITH_SETTINGS = (
    "One with settings is an object: from agentlightning.metrics.trackers import WandbSink, and "
    "sinks=[WandbSink('my-project')]."
)


def as_sink(sink: Sink | str, project: str = "agentlightning") -> Sink:
    """The tracker of a name; a sink as it is.

    Raises ConfigError for a name that there is not, or whose package is not installed.
    """
    if isinstance(sink, Mapping):
        raise ConfigError(f"A sink is no dict. {_WITH_SETTINGS}")
    if not isinstance(sink, str):
        return sink
    if sink not in TRACKERS:
        raise ConfigError(f"There is no tracker '{sink}'; there are {', '.join(TRACKERS)}. {_hint(sink)}")
    return TRACKERS[sink](project)


def _hint(name: str) -> str:
    """What is meant by a name of no tracker."""
    if re.split(r"[:=/(]", name)[0].strip() in TRACKERS and not name.isalpha():
        return _WITH_SETTINGS
    parts = [part.strip() for part in re.split("[,;+ ]", name) if part.strip()]
    if len(parts) > 1:
        return f"Give each by itself: {' '.join(f'--log {part}' for part in parts)}, or sinks={parts}."
    near = {"tb": "tensorboard", "wb": "wandb", "w&b": "wandb"}.get(name.lower()) or nearest(name, TRACKERS)
    if near:
        return f"Did you mean {near}?"
    return (
        "Metrics are written to metrics.jsonl in the run's folder in any case, and shown by the dashboard. For another "
        "tracker write a subclass of agl.metrics.Sink with a method step(self, metrics): sinks=[Mine()]."
    )
