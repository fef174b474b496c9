"""Many conversations with a model side by side, in this process, without HTTP: for measuring it while making it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agentlightning.cli.example import load_example

Messages = Sequence[dict[str, Any]]


class Batch:
    """Samples at temperature 1, from a seed."""

    def __init__(self, model: Any, renderer: Any) -> None:
        self._model, self._renderer = model, renderer
        self._play: Any = load_example("calc", "play")
        self._generator = torch.Generator().manual_seed(0)

    def ask(self, conversations: Sequence[Messages]) -> list[str]:
        """What the model says to each."""
        if not conversations:
            return []
        prompts = [self._renderer.render_ids(list(c), add_generation_prompt=True) for c in conversations]
        stop = self._renderer.get_stop_token_ids()
        said = self._play.sample(self._model, prompts, stop, generator=self._generator)
        return [self._renderer.parse_response(response).content for response in said]
