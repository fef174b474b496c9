"""`agl whatif`: the gradient of a stored step under other losses, advantages, credits and corrections."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from agentlightning.algorithm.checkpoint import held_before, model_path, read_checkpoint
from agentlightning.algorithm.features import FeatureSettings
from agentlightning.algorithm.records import names_of
from agentlightning.algorithm.whatif import (
    TAKEN,
    Compared,
    StoredStep,
    WhatIf,
    needs_reference,
    stored_episodes,
    telling_variants,
    variant,
    what_if,
)
from agentlightning.backend.base import POLICY, ModelSpec
from agentlightning.cli.commands.look import WhatIfOptions
from agentlightning.cli.configuration import algorithm_of_a_run, parsed_settings
from agentlightning.cli.opened import OpenedRun, described, opened_run
from agentlightning.console import fitting_table, one_line, terminal
from agentlightning.errors import ConfigError
from agentlightning.trainer.sync import run_sync
from agentlightning.types.finding import counted

if TYPE_CHECKING:
    from agentlightning.learner.torch_learner import TorchLearner

GAP = 1e-3
"""Log-probs that are further apart than this are of other weights."""


def _changes(options: WhatIfOptions) -> list[dict[str, Any]]:
    """A variant per value of `--loss` and the like, and one per `--set`, which may hold several NAME=VALUE."""
    known = names_of(FeatureSettings)
    return [
        *({name: value} for name in ("loss", "advantage", "credit", "correction") for value in getattr(options, name)),
        *(parsed_settings(text.split(), known) for text in options.settings),
    ]


def ask_what_if(options: WhatIfOptions) -> None:
    """Compute and print it."""
    run_sync(_ask(options))


async def _ask(options: WhatIfOptions) -> None:
    changes = _changes(options)
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(opened_run(options.run, options.run_id))
        settings = _settings_of(opened, options.trust)
        metrics = _row(await opened.steps(), options.step)
        step, policy = int(metrics["step"]), _policy(settings, options.policy)
        store_id = opened.run.run_id if opened.run is not None else None
        episodes = await stored_episodes(opened.store, store_id, settings, metrics, policy)
        named = {" ".join(f"{n}={v}" for n, v in c.items()): variant(settings, c) for c in changes}
        variants = named or telling_variants(settings, episodes)
        checkpoint = options.checkpoint or stack.enter_context(held_before(opened.folder, step))
        info = None if checkpoint is None else read_checkpoint(checkpoint)
        learning = {} if info is None else info.learning.get(policy or POLICY, {})
        learner = _learner([settings, *variants.values()], checkpoint, policy)
        stored = StoredStep(step, episodes, settings, metrics, learning)
        found = await what_if(stored, learner, variants)
        after = 0 if info is None else info.step
    _print(found, stored, str(checkpoint or settings.model), after, policy, as_json=options.as_json)


def _settings_of(opened: OpenedRun, trust: bool) -> FeatureSettings:
    about = described(opened.folder)
    if opened.run is not None:
        about = {"algorithm": opened.run.algorithm, "settings": opened.run.settings}
    if "algorithm" not in about:
        raise ConfigError(f"Nothing says with which settings the run in '{opened.folder}' was trained.")
    return algorithm_of_a_run(about, opened.folder, trust=trust)


def _row(steps: Sequence[Mapping[str, Any]], step: int | None) -> Mapping[str, Any]:
    """The metrics of the step; of the last one if none is named."""
    if not steps:
        raise ConfigError("The run has learned no step yet.")
    if step is None:
        return steps[-1]
    found = [row for row in steps if row["step"] == step]
    if not found:
        raise ConfigError(f"The run has no step {step}; it has {steps[0]['step']} to {steps[-1]['step']}.")
    return found[-1]


def _policy(settings: FeatureSettings, name: str | None) -> str | None:
    names = list(settings.adapters)
    if name is not None and name not in names:
        raise ConfigError(f"There is no policy '{name}' in this run; it trained {', '.join(names) or 'one alone'}.")
    return name or next(iter(names), None)


def _learner(settings: Sequence[FeatureSettings], checkpoint: Path | None, policy: str | None) -> TorchLearner:
    """With the weights and the optimiser of the checkpoint, or as the run began."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin take the cores of a run that goes on
    import transformers

    from agentlightning.backend.embedded.backend import settings_of
    from agentlightning.backend.embedded.server import load_all
    from agentlightning.learner.torch_learner import TorchLearner

    transformers.logging.disable_progress_bar()
    spec = replace(settings[0].policy.model, reference=needs_reference(settings))
    process = settings_of(_from(spec, checkpoint))
    learner = TorchLearner(load_all(process)[policy or POLICY], process.learner)
    learner.policy.activate()
    state = None if checkpoint is None else checkpoint / "optimizer" / (policy or "")
    if state is not None and any(state.glob("*.pt")):
        learner.load_state(state)
    return learner


def _from(spec: ModelSpec, checkpoint: Path | None) -> ModelSpec:
    if checkpoint is None:
        return spec
    weights = model_path(checkpoint)
    if not spec.adapters:
        return replace(spec, model=str(weights))
    return replace(spec, policies={alias: str(weights / alias) for alias in spec.adapters})


# ---- showing it ------------------------------------------------------------------------------------------------------


def _print(found: WhatIf, stored: StoredStep, weights: str, after: int, policy: str | None, *, as_json: bool) -> None:
    recorded = stored.metrics.get(f"{policy}/grad_norm" if policy else "grad_norm")
    if as_json:
        about = {"step": stored.step, "rollouts": len(stored.episodes), "weights": weights, "weights_step": after}
        rest = {"logprob_gap": found.logprob_gap, "kl": found.kl, "updates": found.updates}
        numbers = {**about, **rest, "recorded_grad_norm": recorded}
        terminal().print_json(json.dumps({**numbers, "compared": [asdict(one) for one in found.compared]}))
        return
    print_ = terminal().print
    tokens = sum(e.sampled_tokens for e in stored.episodes)
    updates = f", {found.updates} updates" if found.updates > 1 else ""
    print_(
        Text(
            f"Step {stored.step}: {counted(len(stored.episodes), 'rollout')}, "
            f"{counted(tokens, 'sampled token')}{updates}",
            "bold",
        )
    )
    print_(Text(f"weights: {one_line(weights)}, after step {after}", "dim"))
    print_(Text(_about_gap(found, stored, after, recorded), "dim"))
    print_(fitting_table([_cells(one) for one in found.compared], terminal()))


def _about_gap(found: WhatIf, stored: StoredStep, after: int, recorded: float | None) -> str:
    words = f"log-probs: stored and recomputed differ by {found.logprob_gap:.1e} at most (KL {found.kl:.1e})"
    if after < stored.step - 1:
        words += f"; the weights of before step {stored.step} are not kept, these are older"
    elif found.logprob_gap > GAP and not stored.settings.is_off_policy:
        words += "; these are not the weights that sampled"
    norm = found.compared[0].grad_norm
    return words + ("" if recorded is None else f"\ngradient norm: {norm:.4g} now, {recorded:.4g} when it was taken")


def _cells(one: Compared) -> dict[str, Text]:
    """What a row says of a variant, by the title of the column; what matters most comes first."""
    cells = {
        "variant": one_line(one.name, 40),
        "cosine": "–" if one.cosine is None else f"{one.cosine:.3f}",
        "gradient": f"{one.grad_norm:.3g}",
        "clipped": f"{one.clip_fraction:.1%}",
        "ratios": f"{one.ratio_min:.3f}…{one.ratio_max:.3f}",
        "eff. sample": f"{one.effective_sample_size:.1%}",
        "zero adv.": f"{one.zero_advantages:.0%}",
    }
    return {title: Text(cell, "bold" if one.name == TAKEN else "") for title, cell in cells.items()}
