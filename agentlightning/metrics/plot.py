"""The learning curve as a picture."""

from __future__ import annotations

import warnings
from pathlib import Path

from agentlightning.errors import missing_extra
from agentlightning.files import open_private
from agentlightning.metrics.sink import read_metrics


def plot_curve(metrics_file: Path, picture: Path, title: str) -> None:
    """Draw reward and validation reward over steps into a PNG. Raises ConfigError where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("torch", "matplotlib") from None
    rows = read_metrics(metrics_file)
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    train = [(m["step"], m["reward"]) for m in rows if m.get("reward") is not None]
    val = [(m["step"], m["val_reward"]) for m in rows if m.get("val_reward") is not None]
    if train:
        axes.plot(*zip(*train, strict=True), color="#9db4c0", linewidth=1.5, label="training rollouts")
    if val:
        axes.plot(*zip(*val, strict=True), color="#b23a48", linewidth=2, marker="o", label="validation")
    axes.set(xlabel="step", ylabel="mean reward")
    axes.set_title(title, parse_math=False)  # a folder's name is no formula
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if train or val:
        axes.legend(frameon=False, loc="lower right")
    with open_private(picture, "wb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a sign of the name that the font does not have
        figure.savefig(file, format="png", dpi=130)
