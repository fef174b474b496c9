"""verl's Tinker-shaped worker, and what our verbs ask of a rank besides: clip, halve a step, whole weights and state.

Parameters, gradients and optimiser are verl's. What is done with them here `Optimizer` does as in the own learner, so
that their state is written whole, and fits any number of workers and the own learner. verl's own export
(`get_per_tensor_param`) is not taken because it rounds to bfloat16.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.workers.engine_workers_tinker import TinkerTrainingWorker

from agentlightning.errors import ConfigError
from agentlightning.learner.optimizer import Optimizer, spread, whole

if get_device_name() == "cpu":
    from agentlightning.learner.verl.cpu import register_engine

    register_engine()

IN_PEFT = "base_model.model."
"""What peft puts before the names of a model's tensors."""

everywhere = register(dispatch_mode=Dispatch.ONE_TO_ALL)
"""All ranks do it together; the list of what they return begins with the first one's."""


class RankWorker(TinkerTrainingWorker):
    """One rank."""

    def __repr__(self) -> str:
        return f"verl worker {self.rank}"  # what Ray puts before each line that it prints

    @everywhere
    def begin(self) -> str:
        """Load the model; an adapter is a new one, for `take`. The name of this process."""
        import ray

        transformers.logging.disable_progress_bar()
        self.reset()
        trained = {n: p for n, p in self.engine.module.named_parameters() if p.requires_grad}
        self._names = [name.removeprefix(IN_PEFT) for name in trained]
        self._parameters = list(trained.values())
        for group in self.engine.optimizer.param_groups:  # verl's has what is frozen, too, and states number it
            group["params"] = [p for p in group["params"] if p.requires_grad]
        self._steps = Optimizer(self._parameters, self.engine.optimizer)
        self._before: list[Tensor] = []
        return f"{self!r} (process {os.getpid()} on {ray.util.get_node_ip_address()})"

    @everywhere
    def take(self, first: int, weights: Mapping[str, Tensor]) -> None:
        """Let the trained tensors from `first` on, which must have these names, be these whole ones."""
        mine = self._parameters[first : first + len(weights)]
        if list(weights) != self._names[first : first + len(weights)]:
            raise ConfigError("verl trains other tensors of this model than the own learner: take learner='own'.")
        with self._loaded(), torch.no_grad():
            for parameter, tensor in zip(mine, weights.values(), strict=True):
                parameter.copy_(spread(tensor.to(parameter.device, parameter.dtype), parameter))

    @everywhere
    def clip(self, limit: float) -> float:
        """The norm of the gradients before they are scaled down to the limit."""
        with self._loaded():
            return self._steps.clip(limit)

    @everywhere
    def keep_weights(self) -> None:
        """For `halve_step`."""
        with self._loaded():
            self._before = self._steps.weights()

    @everywhere
    def halve_step(self) -> None:
        with self._loaded():
            self._steps.halve_step(self._before)

    @everywhere
    def weights(self, first: int, last: int) -> list[Tensor] | None:
        """The trained tensors from `first` to before `last`, whole, from the first rank."""
        with self._loaded(), torch.no_grad():
            found = [whole(p.detach()).cpu() for p in self._parameters[first:last]]
        return found if self.rank == 0 else None

    @everywhere
    def optimizer_state(self) -> dict[str, Any] | None:
        """Whole, from the first rank."""
        with self._loaded():
            state = self._steps.state()
        return state if self.rank == 0 else None

    @everywhere
    def load_optimizer(self, state: Mapping[str, Any]) -> str | None:
        """What does not fit, in words."""
        with self._loaded():
            try:
                self._steps.load(state)
            except (ValueError, KeyError) as error:
                return str(error)
        return None

    @contextmanager
    def _loaded(self) -> Iterator[None]:
        """Weights, gradients and optimiser are where it computes."""
        with self.engine.train_mode(zero_grad_on_exit=False):
            yield
