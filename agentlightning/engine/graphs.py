"""Decoding passes as CUDA graphs: recorded once per size, then started by one call instead of hundreds.

A decoding pass of a small batch is little work in many kernels, and a GPU waits for Python to start each of them. A
graph starts them all. Its shapes are fixed, so passes are rounded up: to a number of rows and a number of tokens
attended to (`row_sizes`, `context_sizes`). Rows that are added write nowhere, and nothing attends to tokens that are.

The first pass of a size is computed as usual, recorded, computed once more from the recording, and compared. A model
that cannot be recorded (experts that are chosen in Python, say) is computed as usual from then on, with a warning.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

MOST_GRAPHS = 96
"""Kept at once; the one that was not used for longest goes first."""
FEWEST_TOKENS = 128
_GAP_FLOAT32 = 1e-3
_GAP_HALF = 0.05

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""A decoding pass on the device: ids [R, 1], positions [R, 1], places to write to [R], and how many tokens of the slots
are attended to; gives logits, [R, V]."""
Replay = tuple[Callable[[], None], torch.Tensor]
"""What computes a recorded pass again, and the logits that it leaves."""


class DecodeGraphs:
    """The recorded passes of one model over the first so many slots."""

    def __init__(
        self, model: PreTrainedModel, compute: Compute, *, slots: int, capacity: int, nowhere: int, device: torch.device
    ) -> None:
        """`capacity` is what a slot holds, `nowhere` a place that nothing attends to."""
        self._model = model
        self._compute = compute
        self._rows, self._contexts = row_sizes(slots), context_sizes(capacity)
        self._nowhere = nowhere
        # One copy to the GPU per pass: ids, positions, and where to write.
        self._host = torch.zeros((3, slots), dtype=torch.long, pin_memory=device.type == "cuda")
        self._given = torch.zeros((3, slots), dtype=torch.long, device=device)
        self._recorded: dict[tuple[int, int], Replay] = {}
        self._addresses = self._where_weights_are()
        if device.type == "cuda":
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self.works = True

    def decode(self, ids: np.ndarray, positions: np.ndarray, write: np.ndarray, context: int) -> torch.Tensor:
        """One token in each of the first slots, arrays [R]; logits after it, [R, V], valid until the next call."""
        count = len(ids)
        rows, tokens = _at_least(self._rows, count), _at_least(self._contexts, context)
        given = self._host.numpy()[:, :rows]
        given[:, :count] = ids, positions, write
        given[:, count:] = np.array([[0], [0], [self._nowhere]])
        self._given[:, :rows].copy_(self._host[:, :rows], non_blocking=True)
        if (rows, tokens) not in self._recorded:
            return self._record(rows, tokens)[:count]
        replay, logits = self._recorded[rows, tokens] = self._recorded.pop((rows, tokens))  # the latest comes last
        replay()
        return logits[:count]

    def weights_changed(self) -> None:
        """Graphs read weights where they were when they were recorded; where others have taken their place, all are
        recorded anew."""
        if (addresses := self._where_weights_are()) != self._addresses:
            self._addresses = addresses
            self._recorded.clear()

    def _where_weights_are(self) -> list[int]:
        return [p.data_ptr() for p in self._model.parameters()] + [b.data_ptr() for b in self._model.buffers()]

    def _record(self, rows: int, tokens: int) -> torch.Tensor:
        """Compute the pass that was given, and keep it."""
        ids, positions, write = self._given[:, :rows]
        given = (ids[:, None], positions[:, None], write, tokens)
        plain = self._compute(*given)
        try:
            replay, logits = self._capture(given)
            replay()
            gap = float((plain.float().log_softmax(-1) - logits.float().log_softmax(-1)).abs().max())
        except Exception as error:  # whatever CUDA, torch or a model's own code raises while it is recorded
            self._give_up(str(error).partition("\n")[0])
            return plain
        if not gap <= (_GAP_FLOAT32 if plain.dtype in (torch.float32, torch.float64) else _GAP_HALF):
            self._give_up(f"a recorded pass has log-probs that are {gap:.2g} off")
            return plain
        if len(self._recorded) >= MOST_GRAPHS:
            del self._recorded[next(iter(self._recorded))]
        self._recorded[rows, tokens] = replay, logits
        return plain

    def _capture(self, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]) -> Replay:
        """The first pass ran on the current stream and has made what is made once (handles, plans, kernels)."""
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        torch.cuda.synchronize()
        collecting = gc.isenabled()
        gc.disable()  # what is freed in between could end the recording
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    logits = self._compute(*given)
                finally:
                    graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        return graph.replay, logits

    def _give_up(self, why: str) -> None:
        logger.warning(
            "%s samples without CUDA graphs, which takes longer where few requests are sampled at once: %s.",
            type(self._model).__name__, why.rstrip("."),
        )  # fmt: skip
        self.works = False
        self._recorded.clear()


def row_sizes(slots: int) -> list[int]:
    """1, 2, 4, 8, then in steps of at most a quarter."""
    return _sizes([1, 2, 4], 8, slots)


def context_sizes(capacity: int) -> list[int]:
    """In steps of at most a quarter, and the whole."""
    return _sizes([], FEWEST_TOKENS, capacity)


def _sizes(first: list[int], start: int, end: int) -> list[int]:
    """Each octave from `start` on in four steps."""
    sizes, octave = first, start
    while octave < end:
        sizes += [octave + octave // 4 * quarter for quarter in range(4)]
        octave *= 2
    return [*(size for size in sizes if size < end), end]


def _at_least(sizes: list[int], wanted: int) -> int:
    return next(size for size in sizes if size >= wanted)
