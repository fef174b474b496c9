"""`agl models`: which models can be trained here: those that ship, those in the cache, and sizes of others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from agentlightning.cli.commands.start import ModelsOptions
from agentlightning.cli.plan import as_time
from agentlightning.console import one_line, terminal
from agentlightning.errors import AgentLightningError
from agentlightning.models import KNOWS, shipped_models
from agentlightning.models.hardware import Hardware, devices
from agentlightning.models.plan import PlannedJob, best, changes, gib
from agentlightning.models.shape import SIZES, TRIED, ModelShape, known_shape

CONTEXT, RESPONSE = 1024, 256
"""Tokens of the rollouts that the table reckons with, and how many of them are sampled."""


@dataclass(frozen=True, kw_only=True)
class Suited:
    """A model, and what a step of training it takes on this machine."""

    model: str
    source: str
    """ships, cache, hub, or size: any model of about so many parameters."""
    parameters: int
    fits: bool
    settings: Mapping[str, object]
    """What to set for it to fit; nothing where the default settings do."""
    memory: int
    """Bytes of what takes most on one device."""
    step_seconds: float
    remark: str


def list_models(options: ModelsOptions) -> None:
    """Print the models, with the memory and the seconds of a step by the numbers of `agl plan`."""
    device, count = devices(options.gpus)
    found = [_suited(name, source, shape, device, count) for name, source, shape in _known()]
    if options.as_json:
        about = {"device": device.name, "count": count, "memory": device.memory}
        terminal().print_json(json.dumps(about | {"models": [asdict(one) for one in found]}))
        return
    name = f"{count} × {device.name}" if count > 1 else device.name
    out = terminal()
    out.print(
        f"On {name} with {gib(device.memory)}: steps of 16 tasks × 8 rollouts, {CONTEXT} tokens each of which "
        f"{RESPONSE} are sampled. On paper, for the order of magnitude; agl plan has all settings.\n",
        markup=False,
    )
    for one in found:
        out.print(_line(one), style="" if one.fits else "dim", markup=False, soft_wrap=True)
    out.print(
        "\nAny other causal language model of the Hugging Face hub, or a directory with one, can be given as --model.",
        markup=False,
    )


def _known() -> Iterator[tuple[str, str, ModelShape]]:
    """Name, source and sizes, each model once."""
    cached = list(_cached())
    for name in shipped_models():
        yield name, "ships", known_shape(name)
    yield from ((name, "cache", shape) for name, shape in cached)
    here = {name for name, _ in cached}
    for name, (size, _) in TRIED.items():
        if name not in here:
            yield name, "hub", SIZES[size]
    yield from ((size, "size", shape) for size, shape in SIZES.items() if size not in {s for s, _ in TRIED.values()})


def _cached() -> Iterator[tuple[str, ModelShape]]:
    """The models whose configuration and weights lie in the local cache of the Hugging Face hub."""
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return
    try:
        repositories = scan_cache_dir().repos
    except (CacheNotFound, OSError):
        return
    for repository in sorted(repositories, key=lambda r: r.repo_id):
        files = {file.file_name for revision in repository.revisions for file in revision.files}
        if repository.repo_type != "model" or not any(Path(name).suffix == ".safetensors" for name in files):
            continue
        try:
            yield repository.repo_id, known_shape(repository.repo_id)
        except AgentLightningError:  # no causal language model
            continue


def _suited(name: str, source: str, shape: ModelShape, device: Hardware, count: int) -> Suited:
    """With the default settings if they fit, else with the first of the changes that `agl plan` proposes."""
    context = min(CONTEXT, shape.max_context or CONTEXT)
    dtype = "bfloat16" if device.is_gpu else "float32"
    job = PlannedJob(shape=shape, dtype=dtype, context=context, response=context // 4)
    layout, settings = best(job, device, count), {}
    if not layout.fits:
        ways = [way for way in changes(job, device, count) if "--gpus" not in way.settings]
        layout, settings = (ways[0].layout, ways[0].settings) if ways else (layout, {})
    remark = f"knows {KNOWS[name]} only" if name in KNOWS else TRIED[name][1] if name in TRIED else ""
    return Suited(
        model=name,
        source=source,
        parameters=shape.parameters,
        fits=layout.fits,
        settings=settings,
        memory=max(sum(parts.values()) for parts in layout.memory.values()),
        step_seconds=layout.step_seconds,
        remark=remark,
    )


def _line(one: Suited) -> str:
    """A model, and below it what to set and what is known of it."""
    step = f"{as_time(one.step_seconds)} a step" if one.fits else "does not fit"
    line = f"{one_line(one.model, 40):37}{one.source:7}{gib(one.memory):>12}  {step:>14}"
    settings = ", ".join(f"{name}={value!r}" for name, value in one.settings.items()) if one.fits else ""
    return "\n".join([line, *(f"    {words}" for words in (settings and f"with {settings}", one.remark) if words)])
