"""Settings that could be meant and seldom are: a share given in percent, a number of another unit, a bound that nothing
reaches. Each is said once, before anything is learned; what can never be meant is refused by the setting's own bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentlightning.algorithm.records import names_of, value_of, written
from agentlightning.algorithm.settings import TrainingSettings


@dataclass(frozen=True, slots=True)
class Usual:
    """What a setting is in almost every training."""

    low: float
    high: float
    words: str
    """What it is or does, as a sentence."""


_A_SHARE = "It is a share, such as 0.2 for 20 %."
USUAL: Mapping[str, Usual] = {
    "learning_rate": Usual(1e-12, 0.5, "A step moves each weight by about as much. Leave it out for the default."),
    "clip_low": Usual(0, 0.9, _A_SHARE),
    "clip_high": Usual(0, 10, _A_SHARE),
    "kl_coef": Usual(0, 1, "A large one holds the model where it began."),
    "entropy_coef": Usual(-0.1, 0.1, "A large one makes answers random, whatever they earn."),
    "weight_decay": Usual(0, 1, "A large one draws all weights to 0."),
    "max_kl": Usual(1e-6, 1, "It is in nats per token, and beyond 1 it guards against nothing; None turns it off."),
    "temperature": Usual(0.2, 2, "From 2 on most of what is sampled is noise, and near 0 siblings are the same."),
    "lora_rank": Usual(1, 1024, "An adapter that is as large as the weights saves no memory."),
    "max_context": Usual(32, 4_194_304, "It is in tokens of prompt and response together."),
    "tokens_per_batch": Usual(256, 4_194_304, "It is in tokens; one row of the longest rollout takes max_context."),
    "max_staleness": Usual(0, 64, "It is in steps; so old rollouts teach little."),
    "dynamic_sampling": Usual(0, 64, "It is in rounds of sampling; a step may take that many times as long."),
    "epochs": Usual(1, 1000, "It says how often every task is taken; steps=… bounds a run by its length."),
    "stall_seconds": Usual(10, 604_800, "It is in seconds."),
    "replay_size": Usual(1, 100_000, "It is in groups, which are kept in memory."),
}
"""By flat name. A value outside is reported, and used all the same."""


def unusual(settings: TrainingSettings) -> Iterator[str]:
    """A sentence for each setting that is probably a slip."""
    known = names_of(type(settings))
    for name, usual in USUAL.items():
        value: Any = value_of(settings, name) if name in known else None
        if value is not None and not usual.low <= value <= usual.high:
            beyond = f"below {usual.low:g}" if value < usual.low else f"above {usual.high:g}"
            yield f"{written(settings, name)} is {value:g}, and it is seldom {beyond}. {usual.words}"
    if settings.steps is not None and settings.warmup_steps >= settings.steps and settings.warmup_steps > 0:
        yield (
            f"warmup_steps={settings.warmup_steps} is not less than steps={settings.steps}, so the learning rate never "
            "reaches its height. It is a number of steps; a tenth of them is usual."
        )
    if settings.steps is not None and settings.epochs > 1:
        yield f"steps={settings.steps} says how long the run is, and epochs={settings.epochs} nothing: leave one out."
    if settings.val_every == 0 and settings.chooses("val_repeats", "val_before", "val_temperature"):
        yield "val_every=0 never validates, so no other setting of validation has an effect: leave them out."
    if settings.max_tokens is not None and settings.max_tokens > settings.max_context:
        yield (
            f"max_tokens={settings.max_tokens} is more than max_context={settings.max_context}, which prompt and "
            "response share: raise max_context, or lower max_tokens."
        )
