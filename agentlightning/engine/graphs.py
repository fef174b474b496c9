"""Decoding passes as CUDA graphs: recorded once per size, then started by one call instead of hundreds.

A decoding pass of a small batch is little work in many kernels, and a GPU waits for Python to start each of them. A
graph starts them all. Its shapes are fixed, so passes are rounded up: to a number of rows and a number of tokens
attended to (`row_sizes`, `context_sizes`). Rows that are added write nowhere, and nothing attends to tokens that are.

Recording takes as long as a few passes, so the first pass of a size is computed as usual: the size may not come again.
The second one is computed as usual and recorded, computed once more from the recording, and compared. A model that
cannot be recorded (experts that are chosen in Python, say) is computed as usual from then on, with a warning.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

MOST_GRAPHS = 192
"""Kept at once; the one that was not used for longest goes first."""
FEWEST_TOKENS, LONG = 128, 2048
_GAP_FLOAT32 = 1e-3
_GAP_HALF = 0.05

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""A decoding pass on the device: ids [R, 1], positions [R, 1], places to write to [R], and how many tokens of the slots
are attended to; gives logits, [R, V]."""
Replay = Callable[[], None]
"""What does again what was recorded."""


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
        self._logits = torch.empty(0)
        """What a recorded pass leaves: the same place for all, so that none keeps memory of its own. [slots, V]"""
        self._met: set[tuple[int, int]] = set()
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
        size = rows, tokens
        if (replay := self._recorded.pop(size, None)) is None:
            return self._computed(size)[:count]
        self._recorded[size] = replay  # the latest comes last
        replay()
        return self._logits[:count]

    def weights_changed(self) -> None:
        """Graphs read weights where they were when they were recorded; where others have taken their place, all are
        recorded anew."""
        if (addresses := self._where_weights_are()) != self._addresses:
            self._addresses = addresses
            self._recorded.clear()

    def _where_weights_are(self) -> list[int]:
        return [p.data_ptr() for p in self._model.parameters()] + [b.data_ptr() for b in self._model.buffers()]

    def _computed(self, size: tuple[int, int]) -> torch.Tensor:
        """The pass that was given, computed as usual, and recorded where its size was met before."""
        rows, tokens = size
        ids, positions, write = self._given[:, :rows]
        given = (ids[:, None], positions[:, None], write, tokens)
        plain = self._compute(*given)
        if size not in self._met:
            self._met.add(size)
            return plain
        if not len(self._logits):
            self._logits = plain.new_empty((self._given.shape[1], plain.shape[1]))
        try:
            replay = self._capture(lambda: self._logits[:rows].copy_(self._compute(*given)))
            replay()
            gap = float((plain.float().log_softmax(-1) - self._logits[:rows].float().log_softmax(-1)).abs().max())
        except Exception as error:  # whatever CUDA, torch or a model's own code raises while it is recorded
            self._give_up(str(error).partition("\n")[0])
            return plain
        if not gap <= (_GAP_FLOAT32 if plain.dtype in (torch.float32, torch.float64) else _GAP_HALF):
            self._give_up(f"a recorded pass has log-probs that are {gap:.2g} off")
            return plain
        if len(self._recorded) >= MOST_GRAPHS:
            del self._recorded[next(iter(self._recorded))]
        self._recorded[size] = replay
        return plain

    def _capture(self, work: Callable[[], object]) -> Replay:
        """The same was done on the current stream just before, which has made what is made once (handles, plans,
        kernels)."""
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        torch.cuda.synchronize()
        collecting = gc.isenabled()
        gc.disable()  # what is freed in between could end the recording
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        return graph.replay

    def _give_up(self, why: str) -> None:
        logger.warning(
            "%s samples without CUDA graphs, which takes longer where few requests are sampled at once: %s.",
            type(self._model).__name__, why.rstrip("."),
        )  # fmt: skip
        self.works = False
        self._recorded.clear()


def row_sizes(slots: int) -> list[int]:
    """1, 2, 4, 8, then two to an octave."""
    return [*(size for size in (1, 2, 4) if size < slots), *_sizes(8, slots)]


def context_sizes(capacity: int) -> list[int]:
    """Two to an octave; four where reading the contexts takes most of the time; and the whole."""
    return _sizes(FEWEST_TOKENS, capacity)


def _sizes(start: int, end: int) -> list[int]:
    sizes, octave = [], start
    while octave < end:
        steps = 4 if octave >= LONG else 2
        sizes += [octave + octave * step // steps for step in range(steps)]
        octave *= 2
    return [*(size for size in sizes if size < end), end]


def _at_least(sizes: list[int], wanted: int) -> int:
    return next(size for size in sizes if size >= wanted)
