"""Names of settings that do not exist, and what was probably meant by them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from agentlightning.errors import ConfigError

ELSEWHERE_CALLED = {
    "lr": "learning_rate",
    "batch_size": "tasks_per_step",
    "train_batch_size": "tasks_per_step",
    "per_device_train_batch_size": "tasks_per_step",
    "num_generations": "group_size",
    "n": "group_size",
    "samples_per_task": "group_size",
    "rollouts_per_task": "group_size",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "num_steps": "steps",
    "beta": "kl_coef",
    "kl": "kl_coef",
    "kl_beta": "kl_coef",
    "epsilon": "clip_low",
    "eps": "clip_low",
    "clip_range": "clip_low",
    "clip": "clip_low",
    "epsilon_high": "clip_high",
    "entropy": "entropy_coef",
    "max_length": "max_context",
    "max_seq_length": "max_context",
    "max_model_len": "max_context",
    "context_length": "max_context",
    "max_new_tokens": "max_tokens",
    "lora": "lora_rank",
    "lora_r": "lora_rank",
    "rank": "lora_rank",
    "model_name": "model",
    "base_model": "model",
    "model_path": "model",
    "torch_dtype": "dtype",
    "precision": "dtype",
    "gpu": "device",
    "eval_every": "val_every",
    "eval_steps": "val_every",
    "checkpoint_every": "save_every",
    "save_steps": "save_every",
    "output_dir": "run_dir",
    "checkpoint_dir": "run_dir",
    "num_workers": "n_workers",
    "workers": "n_runners",
    "lr_scheduler_type": "schedule",
    "max_grad": "max_grad_norm",
    "resume_from_checkpoint": "resume",
}
"""Other trainers' words for settings of ours."""


class _SignatureOfInit:
    """What `inspect.signature` says of a class, whatever its `__new__` takes."""

    def __get__(self, _: object, cls: type) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class GivenByName:
    """A class whose settings are keyword arguments: a name that is none is refused with the one that was meant."""

    _otherwise: ClassVar[str | None] = None
    """What is said of a name that nothing is near to; None: all names."""
    _others: ClassVar[Collection[str]] = ()
    """Names of settings that belong elsewhere, as `_otherwise` says, however near they are to one that is here."""

    if not TYPE_CHECKING:  # type checkers and editors look at `__init__`
        __signature__ = _SignatureOfInit()

        def __new__(cls, *positional: Any, **given: Any) -> Self:
            parameters = cls.__signature__.parameters
            by_name = all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())
            if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
                taken = positional if by_name else ()
                refuse_unknown(cls.__name__, taken, given, list(parameters), cls._otherwise, cls._others)
            return super().__new__(cls)


def refuse_unknown(
    what: str,
    positional: Sequence[Any],
    given: Collection[str],
    known: Collection[str],
    otherwise: str | None,
    others: Collection[str] = (),
) -> None:
    """Raises ConfigError for the first name that is no setting, with the one that was probably meant."""
    if positional:
        raise ConfigError(f"{what} takes its settings by name, for example {what}({next(iter(known))}=…).")
    for name in given:
        if name not in known:
            meant = None if name in others else nearest(name, known)
            hint = f"Did you mean {meant}?" if meant else otherwise or f"They are: {', '.join(sorted(known))}."
            raise ConfigError(f"{what} has no setting '{name}'. {hint}")


def nearest(name: str, known: Collection[str]) -> str | None:
    """The setting that was probably meant; None where nothing is near."""
    other = ELSEWHERE_CALLED.get(name.lower())
    if other in known:
        return other
    return next(iter(difflib.get_close_matches(name.lower(), known, n=1)), None)
