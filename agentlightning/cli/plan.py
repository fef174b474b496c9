"""`agl plan`: whether a training fits and how long a step takes, on paper, before a machine is rented for it."""

from __future__ import annotations

import json
from typing import Any

from rich.table import Table

from agentlightning.arguments import can_be
from agentlightning.cli.commands.start import PlanOptions
from agentlightning.console import one_line, terminal
from agentlightning.errors import ConfigError
from agentlightning.models.hardware import Hardware, devices
from agentlightning.models.plan import VLLM_ALONE, Change, Layout, PlannedJob, best, changes, context_bytes, gib
from agentlightning.models.shape import BYTES_OF, count_of, is_size, known_shape
from agentlightning.types.finding import counted

DEFAULT_CONTEXT = 4096


OF_THE_JOB = (
    *("lora_rank", "group_size", "tasks_per_step", "concurrency", "tokens_per_batch"),
    *("gradient_checkpointing", "offload"),
)
"""Options that are settings of a `PlannedJob`."""


def plan_training(options: PlanOptions) -> bool:
    """Print the plan. Returns whether it does not fit."""
    device, count = devices(options.gpus)
    job = job_of(options, device)
    layout = best(job, device, count)
    ways = [] if layout.fits else list(changes(job, device, count))
    if options.as_json:
        terminal().print_json(json.dumps(as_json(options.model, job, layout, count, ways)))
    else:
        _show(options.model, job, layout, count, ways)
    return not layout.fits


def job_of(options: PlanOptions, device: Hardware) -> PlannedJob:
    """With defaults that follow from the model and the device."""
    shape = known_shape(options.model)
    dtype = options.dtype or ("bfloat16" if device.is_gpu else "float32")
    if dtype not in BYTES_OF:
        raise ConfigError(f"--dtype is {dtype!r}; {can_be(dtype, BYTES_OF)}")
    if options.offload and not device.is_gpu:
        raise ConfigError("--offload takes the optimiser from a GPU's memory, and there is none: leave it out.")
    limit = shape.max_context or options.context or DEFAULT_CONTEXT
    if options.context is not None and options.context > limit:
        raise ConfigError(f"'{options.model}' was made for contexts of {limit} tokens; --context is {options.context}.")
    context = options.context or min(DEFAULT_CONTEXT, limit)
    response = options.response or max(1, context // 4)
    if response >= context:
        raise ConfigError(
            f"--response is {response}: what a rollout samples must be less than its context of {context}."
        )
    return PlannedJob(
        shape=shape,
        dtype=dtype,
        context=context,
        response=response,
        **{name: getattr(options, name) for name in OF_THE_JOB},
    )


def as_json(model: str, job: PlannedJob, layout: Layout, count: int, ways: list[Change]) -> dict[str, Any]:
    """The plan as plain data; bytes and seconds."""
    shape = job.shape
    return {
        "model": {"name": model, "parameters": shape.parameters, "active": shape.active, "layers": shape.layers},
        "job": {name: getattr(job, name) for name in job.__slots__ if name != "shape"}
        | {"rollouts": job.rollouts, "tree_tokens": job.tree_tokens, "pass_tokens": job.pass_tokens},
        "device": {"name": layout.device.name, "count": count, "memory": layout.device.memory},
        "layout": _layout(layout),
        "settings": settings_of(job, layout),
        "changes": [{"settings": way.settings, "layout": _layout(way.layout)} for way in ways],
    }


def _layout(layout: Layout) -> dict[str, Any]:
    return {
        "fits": layout.fits,
        "backend": layout.backend,
        "ranks": layout.learners,
        "replicas": layout.replicas,
        "tensor_parallel_size": layout.tensor_parallel,
        "memory": layout.memory,
        "limits": layout.limits,
        "requests_at_once": layout.at_once,
        "published_bytes": layout.published,
        "seconds": layout.seconds | {"step": layout.step_seconds},
    }


def settings_of(job: PlannedJob, layout: Layout) -> dict[str, Any]:
    """What to give to `GRPO(…)`."""
    found: dict[str, Any] = {"dtype": job.dtype, "max_context": job.context}
    found |= {"group_size": job.group_size, "tasks_per_step": job.tasks_per_step, "max_concurrency": job.concurrency}
    if job.lora_rank is not None:
        found["lora_rank"] = job.lora_rank
    if job.gradient_checkpointing:
        found["gradient_checkpointing"] = True
    if job.offload:
        found["offload"] = True
    found["tokens_per_batch"] = job.tokens_per_batch
    if layout.learners > 1:
        found["ranks"] = layout.learners
    if layout.backend == "vllm":
        found["backend"] = "vllm"
        wide, replicas = layout.tensor_parallel, layout.replicas
        if layout.limits["learner"] == layout.device.memory:  # the learner has the first ones to itself
            seen = [",".join(str(layout.learners + r * wide + i) for i in range(wide)) for r in range(replicas)]
            found["backend_options"] = {"devices": seen, "gpu_memory_utilization": VLLM_ALONE}
            found["backend_options"] |= {"replicas": replicas} if replicas > 1 else {}
            found["backend_options"] |= {"tensor_parallel_size": wide} if wide > 1 else {}
    return found


def _show(model: str, job: PlannedJob, layout: Layout, count: int, ways: list[Change]) -> None:
    out, shape = terminal(), job.shape
    trained = f"LoRA of rank {job.lora_rank}" if job.lora_rank else ("the adapter" if shape.adapter else "all weights")
    name = f"{count} × {layout.device.name}" if count > 1 else layout.device.name
    out.print(
        f"{one_line(model)}: {count_of(shape.parameters)} parameters, {trained} in {job.dtype}, on {name}.\n"
        f"A step: {counted(job.tasks_per_step, 'task')} × {counted(job.group_size, 'rollout')}, contexts of "
        f"{job.context} tokens of which "
        f"{job.response} are sampled; {job.tree_tokens:,} tokens are learned, {job.pass_tokens:,} in a pass.\n"
        f"One context takes {context_bytes(job) / 2**20:,.0f} MiB of keys and values.\n",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    out.print(_table(layout))
    if layout.fits:
        seconds = ", ".join(f"{what} {as_time(s)}" for what, s in layout.seconds.items() if s)
        at_once = f"{layout.at_once} contexts fit at once{' in each server' if layout.replicas > 1 else ''}"
        out.print(f"\nA step takes about {as_time(layout.step_seconds)}: {seconds}; {at_once}.", markup=False)
        if layout.published:
            words = f"A publication writes {gib(layout.published)} on each machine, for all of its servers."
            out.print(words, markup=False, soft_wrap=True)
        out.print(f"\n  GRPO({_arguments(model, settings_of(job, layout))})", markup=False, soft_wrap=True)
        return
    out.print(
        "\nThat does not fit." + (" What does:" if ways else " Nor does it with other settings, or on another GPU.")
    )
    for way in ways:
        changed = ", ".join(
            f"{name}={value!r}" if name[0] != "-" else f"{name} {value}" for name, value in way.settings.items()
        )
        most = max(sum(parts.values()) for parts in way.layout.memory.values())
        words = f"{gib(most)} with backend={way.layout.backend!r}, a step about {as_time(way.layout.step_seconds)}"
        out.print(f"  {changed}: {words}", markup=False, soft_wrap=True)


def _table(layout: Layout) -> Table:
    title = layout.backend
    if layout.replicas:
        ranks = f"{layout.learners} ranks" if layout.learners > 1 else "1 learner"
        title += f": {ranks}, {layout.replicas} × server on {layout.tensor_parallel} × {layout.device.name}"
    table = Table("memory of", "for", "GiB", title=title, title_justify="left", box=None, padding=(0, 3, 0, 0))
    table.columns[2].justify = "right"
    for who, parts in layout.memory.items():
        for number, (what, size) in enumerate(parts.items()):
            table.add_row(who if not number else "", what, f"{size / 2**30:,.2f}")
        table.add_row("", f"of {gib(layout.limits[who])}", f"{sum(parts.values()) / 2**30:,.2f}", style="bold")
    return table


def _arguments(model: str, settings: dict[str, Any]) -> str:
    named = {"model": "…" if is_size(model) else model}
    return ", ".join(f"{name}={value!r}" for name, value in (named | settings).items())


def as_time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
