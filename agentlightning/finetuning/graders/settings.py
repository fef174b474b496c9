"""What the owner of a server sets about graders."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from agentlightning.litagent.bubblewrap import Bubblewrap
from agentlightning.litagent.isolation import Container

GraderIsolation = Literal["bubblewrap"] | Bubblewrap | Container | None


@dataclass(frozen=True, kw_only=True)
class GraderSettings:
    """What graders may use here, and what runs Python graders."""

    embeddings_model: str | None = None
    """The model whose embeddings `text_similarity` compares by `cosine`; None refuses that metric."""
    models: Collection[str] | None = None
    """The models that `score_model` and `label_model` may ask, by name; None: any."""
    isolation: GraderIsolation = "bubblewrap"
    """What keeps Python graders apart from this machine. None runs them as the user that you are, with no wall around
    them: only for graders that you wrote yourself."""
    python: str = sys.executable
    """The interpreter of Python graders; its packages are those that they can import."""
    images: Mapping[str, str] = field(default_factory=dict)
    """For each `image_tag` that a Python grader may name: an interpreter. Others are refused."""
    seconds: float = 120.0
    """The time that a Python grader may take for one sample."""
    memory_bytes: int = 2 * 1024**3
    """The memory of each process of a Python grader."""
    file_bytes: int = 256 * 1024**2
    """What a Python grader may write, which is kept in memory, to each of the three folders that it can write to."""
    processes: int = 2
    """Samples that are graded at the same time by one Python grader."""
