"""Routing replay: within a step, tokens go through the experts that the weights at the step's beginning chose.

In a mixture of experts each token is computed by a few experts that a router chooses. After an update the router may
choose others, and then a token's log-prob jumps although the policy hardly moved: ratios and clipping mean little.
Replay keeps the choice and lets the router's weights for the chosen experts, and so its gradient, be those of now
(routing replay: Zheng et al., arXiv 2507.18071, section 5.3; "vanilla" replay in arXiv 2512.01374). What the engine
chose is not replayed: with the engine and the learner on the same weights and numerics it is the same choice.

Choices are kept by what the decoder was given, so that a pass that is computed a second time for its gradient finds its
own. A router is a module whose class is called …Router or …Gate; all its calls of `torch.topk` are choices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from agentlightning.errors import ConfigError
from agentlightning.learner.forward import decoder_of


class RoutingReplay:
    """The choices of a model's routers for the passes of a step."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ConfigError for a model without experts."""
        self._model = model
        self._routers = [m for m in model.modules() if type(m).__name__.endswith(("Router", "Gate"))]
        if not self._routers:
            raise ConfigError(
                f"{type(model).__name__} has no routers that are known as such, so there is no routing to replay. "
                "Leave routing_replay out."
            )
        self._kept: dict[tuple[bytes, int, int], Tensor] = {}
        self._passes: set[bytes] = set()
        self._now = b""
        """The pass that is computed."""
        self._choices = self._moved = 0

    def forget(self) -> None:
        """All that was kept."""
        self._kept.clear()
        self._passes.clear()

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Remember what is chosen within the block."""

        def keep(router: int, call: int, chosen: Tensor) -> Tensor:
            self._passes.add(self._now)
            self._kept[self._now, router, call] = chosen.to(torch.int16).cpu()
            return chosen

        with self._watching(keep):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Take what was chosen in the same pass before; a pass that was not kept chooses freely."""

        def replay(router: int, call: int, chosen: Tensor) -> Tensor:
            if self._now not in self._passes:
                return chosen
            kept = self._kept[self._now, router, call].to(chosen)
            self._choices += kept.shape[0]
            self._moved += int((kept.sort(-1).values != chosen.sort(-1).values).any(-1).sum())
            return kept

        with self._watching(replay):
            yield

    def moved(self) -> float:
        """The share of replayed choices that the routers would have made otherwise; counted anew from here on."""
        share = self._moved / self._choices if self._choices else 0.0
        self._choices = self._moved = 0
        return share

    @contextmanager
    def _watching(self, choose: Callable[[int, int, Tensor], Tensor]) -> Iterator[None]:
        decoder = decoder_of(self._model)
        with ExitStack() as stack:
            hook = decoder.register_forward_pre_hook(self._begin, with_kwargs=True)
            stack.callback(hook.remove)
            for number, router in enumerate(self._routers):
                stack.enter_context(_routed(router, lambda call, chosen, n=number: choose(n, call, chosen)))
            yield

    def _begin(self, decoder: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if "forward" in vars(decoder):
            return  # it only hands on hidden states that are there
        seen = hashlib.blake2b(digest_size=16)
        for tensor in (*given, named.get("input_ids"), named.get("position_ids")):
            if isinstance(tensor, Tensor):
                seen.update(f"{tuple(tensor.shape)}".encode() + tensor.detach().cpu().numpy().tobytes())
        self._now = seen.digest()


@contextmanager
def _routed(router: nn.Module, choose: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Within the block the router's choices go through `choose` (number of the choice within a call, chosen)."""
    original = router.forward

    def forward(*given: Any, **named: Any) -> Any:
        with _Choosing(choose):
            return original(*given, **named)

    router.forward = forward
    try:
        yield
    finally:
        del router.forward


class _Choosing(TorchFunctionMode):
    """`torch.topk` whose indices are chosen elsewhere, and whose values are those of the indices."""

    def __init__(self, choose: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__()
        self._choose = choose
        self._calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        indices = self._choose(self._calls, found.indices)
        self._calls += 1
        dim = (kwargs or {}).get("dim", args[2] if len(args) > 2 else -1)
        return torch.return_types.topk((args[0].gather(dim, indices), indices))
