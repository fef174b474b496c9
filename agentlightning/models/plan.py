"""Memory and time of a training step on paper: from a model's sizes and a device's figures, before anything is loaded.

Pure. Memory is what `models.shape` counts (as the refusal of models that do not fit does) plus activations, logits and
contexts; time is arithmetic at the share of a device's peak that is reached in practice. What autograd keeps is counted
in a test. Times were measured for models of 0.6 and 4 billion parameters on one H200 (docs/memory.md); elsewhere take
them for their order of magnitude.

Letters: P parameters (those that a token meets), L layers, C context of a rollout, R tokens that it samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from agentlightning.models.hardware import GIB, GPUS, Hardware, cache_bytes
from agentlightning.models.shape import BYTES_OF, ModelShape

LEARNING_SHARE, GPU_LEARNING_SHARE = 0.35, 0.15
"""Of the peak, in forward and backward passes. On an H200 token trees reached 0.10 (0.6 billion parameters, rollouts of
4,096 tokens), 0.12 (16,384 tokens) and 0.19 (4 billion), with an adapter and gradient checkpointing."""
PREFILL_SHARE = 0.5
DECODE_SHARE = 0.6
"""Of the bandwidth, while tokens are sampled one by one."""
LAYER_SECONDS = {"embedded": 4e-4, "graphs": 1.4e-4, "vllm": 3e-5}
"""What a layer costs per step of sampling, however small it is. On a CPU Python starts transformers' own forward; on a
GPU it is one graph, beside which requests are looked after (measured, see above); vLLM's is one graph, too."""
LOGITS_AT_ONCE = 1 << 26
"""`LearnerOptions.logits_at_once`: more are computed piece by piece."""
LOGITS_COPIES = 4
"""Logits, their log-softmax, and two for entropy and gradient, in float32."""
KEPT = {("float32", False): 1.0, ("float32", True): 0.86, ("short", False): 1.15, ("short", True): 1.47}
"""Activations that are kept, against those of a float32 pass over all weights, by type and adapter: frozen weights need
fewer; with short types norms keep float32, and adapters (float32 themselves) every input once more. Counted like it."""
ENGINE_EXTRA = 2 << 30
"""Of a vLLM server beside weights and contexts: its own activations and graphs."""
VLLM_SHARE, VLLM_ALONE = 0.45, 0.9
"""Of a GPU's memory that a server takes: beside the learner, and alone."""
HOST_BANDWIDTH = 4e9
"""Bytes per second between a device and the host's memory: of weights on their way to a server, or of an optimiser that
is there."""
STEPPED = 28
"""Bytes per weight that AdamW reads and writes: weight, gradient and two moments, and all but the gradient again."""
HOST_MEMORY = 2e10
"""Bytes per second of the host's own memory, all its cores together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedJob:
    """What is to be trained, and how."""

    shape: ModelShape
    dtype: str
    lora_rank: int | None = None
    gradient_checkpointing: bool = False
    offload: bool = False
    """The optimiser is in the host's memory, and steps there."""
    context: int = 4096
    response: int = 1024
    """Tokens that a rollout samples, all its calls together."""
    group_size: int = 8
    tasks_per_step: int = 16
    concurrency: int = 64
    tokens_per_batch: int = 16_384

    @property
    def adapter(self) -> bool:
        return self.lora_rank is not None or self.shape.adapter

    @property
    def each(self) -> int:
        """Bytes of one number."""
        return BYTES_OF[self.dtype]

    @property
    def rollouts(self) -> int:
        return self.group_size * self.tasks_per_step

    @property
    def tree_tokens(self) -> int:
        """What a step learns: each task's beginning once, and what each sibling sampled."""
        return self.tasks_per_step * ((self.context - self.response) + self.group_size * self.response)

    @property
    def pass_tokens(self) -> int:
        """Of one forward and backward pass. A conversation is never cut."""
        return min(max(self.tokens_per_batch, self.context), self.tree_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way to place a job on devices: what each kind of device holds, and the seconds of a step."""

    backend: str
    device: Hardware
    learners: int
    replicas: int
    tensor_parallel: int
    memory: dict[str, dict[str, int]]
    """Bytes by what they are for, of a device that learns, of one that samples, or of one that does both."""
    limits: dict[str, int]
    """What there is of each."""
    seconds: dict[str, float]
    at_once: int
    """Requests whose contexts fit at the same time."""
    published: int = 0
    """Bytes that a publication of all weights writes on each machine, for all of its servers; 0 for an adapter."""

    @property
    def fits(self) -> bool:
        return self.at_once >= 1 and all(sum(m.values()) <= self.limits[who] for who, m in self.memory.items())

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())


def learner_memory(job: PlannedJob) -> dict[str, int]:
    """Bytes of what learns, by what they are for."""
    shape, tokens = job.shape, job.pass_tokens
    weights = shape.parameters * job.each
    state = shape.training_bytes(job.dtype, adapter=job.adapter, offload=job.offload) - weights
    kept = KEPT["float32" if job.each >= 4 else "short", job.adapter]
    activations = int(shape.activation_numbers(tokens) * job.each * kept)
    if job.gradient_checkpointing:  # each layer's input, and one layer as a whole
        activations = activations // shape.layers + 2 * tokens * shape.layers * shape.hidden * job.each
    trained = tokens * job.group_size * job.response * job.tasks_per_step // job.tree_tokens
    logits = min(trained * shape.vocabulary, LOGITS_AT_ONCE) * 4 * LOGITS_COPIES
    return {"weights": weights, "gradients and optimiser": state, "activations": activations, "logits": logits}


def context_bytes(job: PlannedJob) -> int:
    """Keys and values of one whole context."""
    return job.shape.kv_numbers * job.each * job.context


def sampling_seconds(job: PlannedJob, device: Hardware, backend: str, engines: int, wide: int, at_once: int) -> float:
    """Of a step's rollouts on so many engines, each `wide` devices.

    Prompts are arithmetic, 2 P per token (Kaplan et al., arXiv 2001.08361, section 2.1), once per task as siblings
    share them. Each further token reads the weights that are met and the contexts (Pope et al., arXiv 2211.05102,
    section 2), all requests of a batch together.
    """
    shape, share = job.shape, math.ceil(job.rollouts / engines)
    batch = max(1, min(share, math.ceil(job.concurrency / engines), at_once))
    active = shape.active or shape.parameters
    prompts = job.tasks_per_step * (job.context - job.response) / engines
    prefill = prompts * 2 * active / (device.flops * wide * PREFILL_SHARE)
    met = min(shape.parameters - shape.looked_up, active * batch)
    read = met * job.each + batch * context_bytes(job) * (1 - job.response / job.context / 2)
    moving = read / (device.bandwidth * wide * DECODE_SHARE)
    computing = batch * 2 * active / (device.flops * wide * PREFILL_SHARE)
    kind = "graphs" if backend == "embedded" and device.is_gpu else backend
    token = max(moving, computing) + shape.layers * LAYER_SECONDS[kind]
    return prefill + math.ceil(share / batch) * job.response * token


def learning_seconds(job: PlannedJob, device: Hardware, learners: int) -> float:
    """Of one update: 6 P per token (Kaplan et al.), 4 P where the weights are frozen, a forward more with gradient
    checkpointing; and the scores of attention, 2 C per unit of width in a forward, causal. With an optimiser on the
    host each pass's gradients go there, weights come back, and AdamW moves what it reads and writes.
    """
    shape = job.shape
    forwards = (2 if job.adapter else 3) + (1 if job.gradient_checkpointing else 0)
    per_token = 2 * (shape.active or shape.parameters) + 2 * shape.layers * (shape.query or shape.hidden) * job.context
    share = GPU_LEARNING_SHARE if device.is_gpu else LEARNING_SHARE
    computing = job.tree_tokens * forwards * per_token / (device.flops * share * learners)
    if not job.offload or job.adapter:
        return computing
    moves = math.ceil(job.tree_tokens / job.pass_tokens) + 1
    return computing + shape.parameters * (moves * job.each / HOST_BANDWIDTH + STEPPED / HOST_MEMORY)


def layouts(job: PlannedJob, device: Hardware, count: int) -> Iterator[Layout]:
    """The ways to place a job on so many of a device."""
    yield embedded(job, device)
    if device.is_gpu:
        if count == 1:
            yield vllm_shared(job, device)
        most = (count - 1).bit_length()
        for doublings in range(min(most, 1) if job.offload else most):
            yield vllm_apart(job, device, count, 1 << doublings)


def embedded(job: PlannedJob, device: Hardware) -> Layout:
    """Engine and learner in one process, on one set of weights."""
    context = context_bytes(job)
    learner = learner_memory(job)
    free = device.memory - learner["weights"] - learner["gradients and optimiser"]
    budget = cache_bytes(free if device.is_gpu else None)
    at_once = min(budget // context, 2 * job.concurrency)
    memory = learner | {"contexts": min(budget, min(job.concurrency, job.rollouts) * context)}
    seconds = {
        "sampling": sampling_seconds(job, device, "embedded", 1, 1, at_once),
        "learning": learning_seconds(job, device, 1),
    }
    return Layout(
        backend="embedded", device=device, learners=1, replicas=0, tensor_parallel=1, memory={"model": memory},
        limits={"model": device.memory}, seconds=seconds, at_once=at_once,
    )  # fmt: skip


def vllm_shared(job: PlannedJob, device: Hardware) -> Layout:
    """One GPU for both: a server takes its share of it, the learner the rest."""
    budget = int(device.memory * VLLM_SHARE)
    return _with_servers(job, device, 1, 1, budget, {"learner": device.memory - budget})


def vllm_apart(job: PlannedJob, device: Hardware, count: int, learners: int = 1) -> Layout:
    """Some GPUs learn, one rank each; the others sample, as many together as the weights need."""
    budget, wide, others = int(device.memory * VLLM_ALONE), 1, count - learners
    weights = job.shape.parameters * job.each
    while 2 * wide <= others and weights / wide + ENGINE_EXTRA + context_bytes(job) / wide > budget:
        wide *= 2
    return _with_servers(job, device, others // wide, wide, budget, {"learner": device.memory}, learners)


def rank_memory(job: PlannedJob, ranks: int) -> dict[str, int]:
    """Bytes of the first of so many ranks, which has the whole model besides its share of it: what it publishes. Each
    computes about its share of a pass."""
    alone = learner_memory(job)
    if ranks == 1:
        return alone
    return {what: size // ranks for what, size in alone.items()} | {"weights": alone["weights"] * (ranks + 1) // ranks}


def _with_servers(
    job: PlannedJob, device: Hardware, replicas: int, wide: int, budget: int, limits: dict[str, int], learners: int = 1
) -> Layout:
    weights = job.shape.parameters * job.each
    left = budget - weights // wide - ENGINE_EXTRA
    context = context_bytes(job) // wide
    at_once = max(0, left // context)
    wanted = min(job.concurrency, job.rollouts)
    server = {
        "weights": weights // wide,
        "contexts": max(context, min(at_once, math.ceil(wanted / replicas)) * context),
        "beside them": ENGINE_EXTRA,
    }
    published = 0 if job.adapter else weights
    seconds = {
        "sampling": sampling_seconds(job, device, "vllm", replicas, wide, at_once),
        "learning": learning_seconds(job, device, learners),
        "publishing": published / HOST_BANDWIDTH * replicas * wide,
    }
    return Layout(
        backend="vllm", device=device, learners=learners, replicas=replicas, tensor_parallel=wide,
        memory={"learner": rank_memory(job, learners), "server": server}, limits=limits | {"server": budget},
        seconds=seconds, at_once=at_once, published=published,
    )  # fmt: skip


def best(job: PlannedJob, device: Hardware, count: int) -> Layout:
    """The fastest layout that fits; of those that do not, the one that lacks least."""
    return min(layouts(job, device, count), key=lambda layout: (not layout.fits, _missing(layout), layout.step_seconds))


def _missing(layout: Layout) -> float:
    """Bytes that the fullest device lacks; infinite for a context that has no room at all."""
    if layout.at_once < 1:
        return math.inf
    return max(0, *(sum(parts.values()) - layout.limits[who] for who, parts in layout.memory.items()))


@dataclass(frozen=True, slots=True)
class Change:
    """Settings with which a job fits, and how it then lies."""

    settings: dict[str, object]
    layout: Layout


def changes(job: PlannedJob, device: Hardware, count: int) -> Iterator[Change]:
    """What lets a job fit that does not: the smallest change of settings, and beside one that offloads, and so takes
    longer, the smallest that trains an adapter; and the smallest GPU in the table.
    """
    offloads = False
    for settings, changed in _smaller(job):
        if (offloads and "lora_rank" not in settings) or ("offload" in settings and (job.adapter or not device.is_gpu)):
            continue
        layout = best(changed, device, count)
        if layout.fits:
            yield Change(settings, layout)
            if "offload" not in settings:
                break
            offloads = True
    for gpu in GPUS.values():
        layout = best(job, gpu, count)
        if gpu.memory > device.memory and layout.fits:
            yield Change({"--gpus": f"{count}x{gpu.name}" if count > 1 else gpu.name}, layout)
            break


def _smaller(job: PlannedJob) -> Iterator[tuple[dict[str, object], PlannedJob]]:
    """From what costs little to what changes the training."""
    saves: dict[str, object] = {"gradient_checkpointing": True}
    passes: dict[str, object] = {"tokens_per_batch": max(2048, job.context)}
    offload: dict[str, object] = {"offload": True}
    adapter: dict[str, object] = {"lora_rank": 16}
    short: dict[str, object] = {"dtype": "bfloat16"}
    half: dict[str, object] = {"context": job.context // 2, "response": job.response // 2}
    tried = (
        passes, saves, saves | passes, offload, offload | saves | passes, adapter, adapter | saves | passes,
        adapter | short, adapter | short | saves | passes, adapter | short | saves | passes | half,
    )  # fmt: skip
    for settings in tried:
        new = {name: value for name, value in settings.items() if getattr(job, name) != value}
        if "lora_rank" in new and job.adapter:
            del new["lora_rank"]
        yield new, replace(job, **new)  # pyright: ignore[reportArgumentType]


def gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB"
