"""Experiment trackers: the real packages, where they are installed, read back what they were told."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from agentlightning.metrics.trackers import MLflowSink, TensorBoardSink, TrackioSink, WandbSink, numbers
from agentlightning.types import Run

RUN = Run(run_id="run-1", settings={"learning_rate": 1e-5})
STEPS: list[dict[str, Any]] = [
    {"step": n, "reward": n / 10, "reward/format": 0.5, "note": "x", "outcomes": {"ok": 1}, "loss": float("nan")}
    for n in (1, 2, 3)
]


def test_only_finite_numbers_are_sent() -> None:
    assert numbers({**STEPS[0], "done": True}) == {"step": 1.0, "reward": 0.1, "reward/format": 0.5}


def tell(sink: Any) -> None:
    sink.start(RUN)
    for metrics in STEPS:
        sink.step(metrics)
    sink.close()


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_back_what_it_was_told(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tell(TensorBoardSink(tmp_path))
        from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
            EventAccumulator,
        )

        found: Any = EventAccumulator(str(tmp_path / "run-1"))
        found.Reload()
    tensors = found.Tags()["tensors"] or found.Tags()["scalars"]
    assert {"reward", "reward/format"} <= set(tensors)
    events = found.Tensors("reward") if "reward" in found.Tags()["tensors"] else found.Scalars("reward")
    assert [event.step for event in events] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_reads_back_what_it_was_told(tmp_path: Path) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tell(MLflowSink(uri))
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("agentlightning").experiment_id])
    assert run.data.params == {"learning_rate": "1e-05"}
    assert [m.value for m in client.get_metric_history(run.info.run_id, "reward")] == [0.1, 0.2, 0.3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_works_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    tell(WandbSink(folder=tmp_path))
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trackio_takes_what_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio")
    tell(TrackioSink())


@pytest.mark.parametrize("kind", [TensorBoardSink, MLflowSink, WandbSink, TrackioSink])
def test_a_package_that_is_not_there_is_named(kind: Any) -> None:
    package = {"TensorBoardSink": "tensorboard", "MLflowSink": "mlflow", "WandbSink": "wandb", "TrackioSink": "trackio"}
    try:
        __import__(package[kind.__name__])
    except ImportError:
        with pytest.raises(Exception, match=f"pip install {package[kind.__name__]}"):
            kind("x")
