"""What a run's own weights make of a rollout's tokens now: ratios to what sampled them, and entropies.

Neither is recorded. They are computed where a user asks for them, in a process that loads the checkpoint and ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request

from agentlightning.algorithm.checkpoint import list_checkpoints, model_path, read_checkpoint
from agentlightning.dashboard.rollouts import requested
from agentlightning.errors import ConfigError, StoreError
from agentlightning.store.sql import SqlLightningStore
from agentlightning.types import Call, Rollout, Run
from agentlightning.types.arrays import np

SECONDS = 300.0
MOST_TOKENS = 32_768
"""Of one attempt, over all its calls."""
MOST_KEPT = 32
"""Answers that are remembered."""
_MODULE = "agentlightning.backend.embedded.scores"


class Scorer:
    """Computes one rollout at a time, and remembers the last answers."""

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._kept: dict[tuple[str, str], Any] = {}

    async def of(self, key: str, weights: Path, calls: Sequence[Call], run: Run) -> dict[str, dict[str, Any]]:
        """Ratios and entropies of the calls' tokens by call id, with these weights."""
        async with self._one_at_a_time:
            known = (key, str(weights))
            if known not in self._kept:
                found: dict[str, dict[str, Any]] = {}
                for alias in dict.fromkeys(c.info.policy for c in calls):
                    mine = [c for c in calls if c.info.policy == alias]
                    path = weights / alias if (weights / alias).is_dir() else weights
                    found |= _by_call(mine, await _computed(path, mine, run))
                self._kept = {**dict(list(self._kept.items())[1 - MOST_KEPT :]), known: found}
            return self._kept[known]


async def of_rollout(store: SqlLightningStore, request: Request) -> Any:
    """Of an attempt; or the reason why not."""
    rollout_id = request.path_params["rollout_id"]
    rollout, _, attempt = await requested(store, request)
    run = await store.get_run_by_id(rollout.run_id) if rollout.run_id else None
    if run is None or attempt is None:
        return _refused("It belongs to no run, so nobody knows whose weights to ask.")
    if run.status == "running" and request.app.state.live:
        return _refused("While the run goes on, its machine is its own: ask again when it is over.")
    found = (await store.query_calls([rollout_id], latest_attempt_only=False))[rollout_id]
    calls = [c for c in found if c.info.attempt_id == attempt.attempt_id and c.info.trained and len(c.response_ids)]
    if not calls:
        return _refused("No call of this attempt was sampled by a policy in training.")
    if (tokens := sum(len(c.prompt_ids) + len(c.response_ids) for c in calls)) > MOST_TOKENS:
        return _refused(f"Its calls have {tokens:,} tokens, and at most {MOST_TOKENS:,} are computed here.")
    checkpoint = await asyncio.to_thread(_checkpoint_after, run, rollout, request.app.state.folder)
    if checkpoint is None:
        return _refused("The run's checkpoints are not on this machine.")
    scorer: Scorer = request.app.state.scorer
    by_call = await scorer.of(attempt.attempt_id, model_path(checkpoint), calls, run)
    return {"step": read_checkpoint(checkpoint).step, "reason": None, "calls": by_call}


def _refused(reason: str) -> dict[str, Any]:
    return {"step": None, "reason": reason, "calls": {}}


def _checkpoint_after(run: Run, rollout: Rollout, folder: Path | None) -> Path | None:
    """The first kept checkpoint that has learned from the rollout, else the last one."""
    run_dir = Path(str(run.state.get("run_dir") or ""))
    places = [run_dir, *([folder / run_dir.name] if folder is not None else [])]
    kept = next((found for place in places if (found := list_checkpoints(place))), [])
    step = rollout.step
    for checkpoint in kept:
        try:
            if isinstance(step, int) and read_checkpoint(checkpoint).step >= step:
                return checkpoint
        except ConfigError:
            continue
    return kept[-1] if kept else None


async def _computed(weights: Path, calls: Sequence[Call], run: Run) -> Mapping[str, Any]:
    """What the process says. Raises StoreError with its last words where it fails or takes too long."""
    request = {
        "model": str(weights),
        "dtype": str(run.settings.get("dtype") or "float32"),
        "device": str(run.settings.get("device") or "auto"),
        "calls": [
            {
                "prompt_ids": c.prompt_ids.tolist(),
                "response_ids": c.response_ids.tolist(),
                "temperature": c.info.temperature,
            }
            for c in calls
        ],
    }
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", _MODULE, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        answer, complaint = await asyncio.wait_for(process.communicate(json.dumps(request).encode()), SECONDS)
    except TimeoutError:
        raise StoreError(f"It took more than {SECONDS:g} s and was given up.") from None
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode != 0:
        last = complaint.decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
        raise StoreError(f"The scores could not be computed: {last[-1][:500]}")
    return json.loads(answer)


def _by_call(calls: Sequence[Call], found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Ratios π now / π then, both over the whole vocabulary, and entropies."""
    scored: dict[str, dict[str, Any]] = {}
    for call, logprobs, entropies in zip(calls, found["logprobs"], found["entropies"], strict=True):
        ratios = np.exp(np.array(logprobs) - np.asarray(call.plain_logprobs, dtype=np.float64))
        scored[call.info.call_id] = {
            "ratios": [round(float(r), 5) if np.isfinite(r) else None for r in ratios],
            "entropies": [round(float(e), 5) for e in entropies],
        }
    return scored
