"""Several policies in one engine: one queue, one cache, passes of mixed rows; and each as if it were alone."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

from agentlightning.backend.embedded.inbox import Inbox
from agentlightning.backend.embedded.protocol import Events, Frames, Lora, MethodCall, Pause, ProcessSettings, to_parent
from agentlightning.backend.embedded.server import ModelServer
from agentlightning.engine.base import Chunk, concat
from agentlightning.engine.events import Ended, Failed, PartialSample, Request
from agentlightning.engine.kv_cache import SUPPORTED, probe
from agentlightning.engine.torch_engine import TorchEngine
from agentlightning.errors import ConfigError
from agentlightning.learner import adapters
from agentlightning.learner.adapters import load_policies
from agentlightning.learner.policy import LoraSpec, Policy, peft_calls_deprecated_names

from .conftest import collect, drain, make_engine, random_ids, reference, request, run
from .test_kv_cache import SMALL, hybrid

EXACT = 1e-5
TRAINED = ("solver", "checker", "judge")
NAMES = (*TRAINED, "base")


def four(directory: Path, layers: Any = "all-linear", **sources: str) -> dict[str, Policy]:
    """Three adapters whose matrices are random, so that it matters which is applied, and the base."""
    torch.set_num_threads(1)
    spec = LoraSpec(rank=4, target_modules=layers)
    found = load_policies(directory, {**dict.fromkeys(TRAINED), **sources}, frozen="base", lora=spec, device="cpu")
    torch.manual_seed(1)
    for name in TRAINED:
        change(found[name])
    return found


def change(policy: Policy) -> None:
    policy.activate()
    with torch.no_grad():
        for parameter in policy.trainable():
            parameter.normal_(std=0.1)


@pytest.fixture
def policies(tiny_model_dir: Path) -> dict[str, Policy]:
    return four(tiny_model_dir)


def shared(policies: dict[str, Policy], **settings: int) -> TorchEngine:
    policy = policies["solver"]
    policy.activate()
    return make_engine(policy, adapters=policy.adapters, **settings)


def asking(number: int, policy: str, prompt: np.ndarray, **params: Any) -> Request:
    one = request(number, prompt, **params)
    return Request(request_id=number, prompt_ids=prompt, params=one.params, stream=number % 3 == 0, policy=policy)


def gap_of(policies: dict[str, Policy], one: Request, chunk: Chunk) -> float:
    """Largest difference from a plain forward of the request's own policy."""
    policies[one.policy].activate()
    expected = reference(policies[one.policy], one.prompt_ids, chunk.ids, one.params.temperature)
    return float(np.abs(expected - chunk.plain_logprobs).max())


def worst(policies: dict[str, Policy], requests: Iterable[Request], found: dict[int, Chunk]) -> float:
    return max(gap_of(policies, one, found[one.request_id]) for one in requests)


def mixed(count: int, **params: Any) -> list[Request]:
    """The same prompts to all policies, with a beginning that they share; greedy, seeded, or neither."""
    prompts = [np.concatenate([random_ids(40, 0), random_ids(1 + 7 * n, n)]) for n in range(count)]
    how: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 5}, {}]
    numbered = enumerate((prompt, name) for prompt in prompts for name in NAMES)
    return [asking(n, name, prompt, **{**how[n % 3], **params}) for n, (prompt, name) in numbered]


class Forwards:
    """Counts the passes of a model, and what their rows are."""

    def __init__(self, model: Any) -> None:
        self.rows: list[int] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _module: Any, _args: Any, given: dict[str, Any]) -> None:
        self.rows.append(len(given["input_ids"]))


@pytest.mark.parametrize("settings", [{"max_concurrency": 6}, {"max_concurrency": 24, "prefill_tokens": 64}])
def test_each_row_is_computed_by_its_own_policy(policies: dict[str, Policy], settings: dict[str, int]) -> None:
    engine = shared(policies, **settings)
    requests = mixed(6)
    found = run(engine, requests)
    assert worst(policies, requests, found) < EXACT
    for one in requests[:8]:
        others = found[one.request_id + (1 if one.policy != "base" else -1)]
        assert gap_of(policies, one, others) > 100 * EXACT, "the policies must differ"
    for name in NAMES:
        policies[name].activate()
        mine = [one for one in requests if one.policy == name]
        alone = run(make_engine(policies[name]), [asking_alone(one) for one in mine])
        followed = [one.request_id for one in mine if one.params.temperature == 0.0 or one.params.seed is not None]
        assert len(followed) == 4
        for number in followed:
            assert alone[number].ids.tolist() == found[number].ids.tolist()


def asking_alone(one: Request) -> Request:
    return Request(request_id=one.request_id, prompt_ids=one.prompt_ids, params=one.params)


def test_prefixes_are_reused_within_a_policy_and_never_across(policies: dict[str, Policy]) -> None:
    engine, prompt = shared(policies), random_ids(40, 5)
    first = run(engine, [asking(n, name, prompt) for n, name in enumerate(NAMES)])
    assert [chunk.cached_tokens for chunk in first.values()] == [0, 0, 0, 0]
    again = [asking(n, name, prompt) for n, name in enumerate(NAMES)]
    second = run(engine, again)
    assert [chunk.cached_tokens for chunk in second.values()] == [39, 39, 39, 39]
    assert worst(policies, again, second) < EXACT


def test_a_step_of_all_policies_is_one_pass(policies: dict[str, Policy]) -> None:
    engine = shared(policies)
    for n in range(12):
        engine.submit(asking(n, NAMES[n % 4], random_ids(6, n), max_tokens=30, seed=n))
    engine.step()
    forwards = Forwards(policies["base"].model)
    for _ in range(5):
        engine.step()
    assert len({running.request.policy for running in engine._running.values()}) == 4
    assert len(forwards.rows) == 5
    assert max(forwards.rows) > 8


def test_a_pass_of_one_policy_takes_the_plain_path(policies: dict[str, Policy]) -> None:
    """Its log-probs are those of an engine of its own to the last bit, and nothing is joined for it."""
    engine, prompt = shared(policies), random_ids(20, 1)
    found = run(engine, [asking(1, "checker", prompt, temperature=0)])[1]
    policies["checker"].activate()
    alone = run(make_engine(policies["checker"]), [request(1, prompt, temperature=0)])[1]
    np.testing.assert_array_equal(found.plain_logprobs, alone.plain_logprobs)
    assert not engine.policies._adapters._by_row._joined  # pyright: ignore


def test_draws_of_a_policy_do_not_depend_on_the_others(policies: dict[str, Policy]) -> None:
    prompt = random_ids(9, 2)
    with_others = run(shared(policies), [asking(n, name, prompt) for n, name in enumerate(NAMES)])
    for n, name in enumerate(NAMES):
        policies[name].activate()
        alone = run(make_engine(policies[name]), [request(n, prompt)])
        assert alone[n].ids.tolist() == with_others[n].ids.tolist(), name


def test_new_weights_of_one_policy_leave_the_contexts_of_the_others(policies: dict[str, Policy]) -> None:
    """Each token is of the version that it came with; of the others nothing is computed again."""
    engine = shared(policies)
    requests = [asking(n, NAMES[n % 4], random_ids(30, n), max_tokens=20) for n in range(8)]
    for one in requests:
        engine.submit(one)
    parts: dict[int, list[Chunk]] = {}
    for _ in range(8):
        collect(engine.step(), parts)
    computed, prefilled = engine._slots.computed.copy(), engine.counters.prefilled
    of_others = engine._slots.busy & (engine._slots.policy != NAMES.index("checker"))
    before = {name: value.clone() for name, value in policies["checker"].model.state_dict().items()}
    change(policies["checker"])
    events = engine.weights_changed(7, "checker")
    assert {event.request_id for event in events if isinstance(event, PartialSample)} <= {1, 5}
    assert (engine._slots.computed[of_others] == computed[of_others]).all()
    collect(events, parts)
    lengths = {one.request_id: sum(len(c.ids) for c in parts.get(one.request_id, [])) for one in requests}
    while engine.active:
        collect(engine.step(), parts)
    again = engine.counters.prefilled - prefilled
    assert again == sum(30 + lengths[n] - 0 for n in (1, 5)), "only its two contexts, up to the newest token"
    for one in requests:
        chunks = parts[one.request_id]
        versions = np.concatenate([np.full(len(c.ids), c.version) for c in chunks])
        whole = concat(chunks)
        if one.policy != "checker":
            assert set(versions) == {0}
            assert gap_of(policies, one, whole) < EXACT
            continue
        assert set(versions) == {0, 7}
        new = reference_of(policies, one, whole)
        assert np.abs(new - whole.plain_logprobs)[versions == 7].max() < EXACT
        after = {name: value.clone() for name, value in policies["checker"].model.state_dict().items()}
        policies["checker"].model.load_state_dict(before)
        old = reference_of(policies, one, whole)
        policies["checker"].model.load_state_dict(after)
        assert np.abs(old - whole.plain_logprobs)[versions == 0].max() < EXACT
    info = {name: engine.info("", name).version for name in NAMES}
    assert info == {"solver": 0, "checker": 7, "judge": 0, "base": 0}


def reference_of(policies: dict[str, Policy], one: Request, whole: Chunk) -> np.ndarray:
    policies[one.policy].activate()
    return reference(policies[one.policy], one.prompt_ids, whole.ids)


def test_a_held_policy_samples_nothing_while_others_go_on(policies: dict[str, Policy]) -> None:
    engine = shared(policies)
    requests = [asking(3 * n + 1, name, random_ids(9, n), max_tokens=12) for n, name in enumerate(NAMES)]
    for one in requests:
        engine.submit(one)
    for _ in range(4):
        engine.step()
    late = [asking(101, "solver", random_ids(9, 7)), asking(104, "judge", random_ids(9, 8))]
    for one in late:
        engine.submit(one)
    found: dict[int, Chunk] = {}
    slot = next(r.slot for r in engine._running.values() if r.request.policy == "solver")
    length = int(engine._slots.length[slot])
    change(policies["solver"])
    while engine.can_step(NAMES, held=["solver"]):
        found |= {e.request_id: e.chunk for e in engine.step(held=["solver"]) if isinstance(e, Ended)}
    assert set(found) == {4, 7, 10, 104}
    (running,) = engine._running.values()
    assert int(engine._slots.length[running.slot]) == length
    assert engine.load_of("solver") == (1, 1)
    (part,) = engine.weights_changed(1, "solver")
    assert isinstance(part, PartialSample)
    rest = drain(engine)
    whole = concat([part.chunk, rest[1]])
    assert (part.chunk.version, rest[1].version, rest[101].version) == (0, 1, 1)
    gaps = np.abs(reference_of(policies, requests[0], whole) - whole.plain_logprobs)
    assert gaps[len(part.chunk.ids) :].max() < EXACT
    assert worst(policies, [*requests[1:], *late], found | rest) < EXACT


def test_one_policy_drains_while_others_begin(policies: dict[str, Policy]) -> None:
    engine = shared(policies, max_concurrency=4)
    for n in range(16):
        engine.submit(asking(3 * n + 1, NAMES[n % 4], random_ids(9, n), max_tokens=8, temperature=0))
    engine.step()
    others, begun = NAMES[1:], set[str]()
    while engine.load_of("solver")[0]:
        engine.step(admit=others)
        begun |= {running.request.policy for running in engine._running.values()}
    assert engine.load_of("solver") == (0, 3), "what waited still waits"
    while engine.can_step(others):
        engine.step(admit=others)
    assert engine.load_of("solver") == (0, 3)
    assert [engine.load_of(name) for name in others] == [(0, 0)] * 3
    assert engine.active
    drain(engine)


def test_many_requests_of_one_policy_do_not_hold_up_another(policies: dict[str, Policy]) -> None:
    engine = shared(policies, max_concurrency=16)
    for n in range(400):
        engine.submit(asking(3 * n + 1, "solver", random_ids(9, n), max_tokens=60, temperature=0, owner="one"))
    for _ in range(20):
        engine.step()
    engine.submit(asking(9_001, "checker", random_ids(9, 3), max_tokens=5, temperature=0, owner="one"))
    ended = [isinstance(event, Ended) and event.request_id == 9_001 for _ in range(9) for event in engine.step()]
    assert any(ended)


def test_aborted_and_given_up_requests_leave_the_others_alone(policies: dict[str, Policy]) -> None:
    engine = shared(policies, max_concurrency=6)
    requests = mixed(5, max_tokens=24)
    for one in requests:
        engine.submit(one)
    parts: dict[int, list[Chunk]] = {}
    for turn in range(12):
        collect(engine.step(), parts)
        engine.abort(requests[turn].request_id)
    given_up = engine.abort_all(["checker"])
    assert given_up
    assert {requests[n].policy for n in given_up} == {"checker"}
    ended = {number: concat(chunks) for number, chunks in (parts | drained(engine, parts)).items()}
    left = [one for one in requests[12:] if one.policy != "checker"]
    assert worst(policies, left, ended) < EXACT


def drained(engine: TorchEngine, parts: dict[int, list[Chunk]]) -> dict[int, list[Chunk]]:
    while engine.active:
        collect(engine.step(), parts)
    return parts


@pytest.mark.slow
@pytest.mark.skipif(not SUPPORTED, reason="pages are given back on Linux only")
def test_little_memory_is_shared(policies: dict[str, Policy]) -> None:
    """Three whole contexts for eight requests of four policies, one of which is held and changed on the way."""
    per_token = probe(policies["base"].model).bytes_per_token
    engine = shared(policies, max_context=250, kv_budget_bytes=per_token * 256 * 3, max_concurrency=8)
    requests = [asking(3 * n + 1, NAMES[n % 4], random_ids(20 + 9 * n, n), max_tokens=200, seed=n) for n in range(10)]
    for one in requests:
        engine.submit(one)
    found: dict[int, list[Chunk]] = {}
    parked, turn = 0, 0
    while engine.active:
        turn += 1
        held = ["judge"] if 60 <= turn < 90 else []
        collect(engine.step(held=held), found)
        if turn == 90:
            collect(engine.weights_changed(1, "judge"), found)
        memory, slots = engine._memory, engine._slots
        assert memory is not None
        assert memory.free >= 0
        assert (slots.computed <= memory.held * memory._budget.tokens).all()
        assert not memory.held[slots.held].any(), "a held policy's memory is the others'"
        parked = max(parked, int((slots.parked & ~slots.held).sum()))
    assert parked > 0, "nothing ever had to wait: the test shows nothing"
    assert worst(policies, requests, {n: concat(chunks) for n, chunks in found.items()}) < 1e-4


def test_a_pass_that_broke_off_while_adapters_were_joined_leaves_the_right_ones(
    policies: dict[str, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, whole, joined = shared(policies), adapters._join, 0

    def short_of_memory(layer: Any, names: list[str]) -> Any:
        nonlocal joined
        joined += 1
        if joined > 3:
            raise MemoryError
        return whole(layer, names)

    def requests(*names: str) -> list[Request]:
        return [asking(n, name, random_ids(9, n), max_tokens=6) for n, name in enumerate(names * 2)]

    first = requests("solver", "checker")
    assert worst(policies, first, run(engine, first)) < EXACT
    monkeypatch.setattr(adapters, "_join", short_of_memory)
    with pytest.raises(MemoryError):
        run(engine, requests("checker", "judge"))
    engine.abort_all()
    monkeypatch.undo()
    again = requests("checker", "judge")
    assert worst(policies, again, run(engine, again)) < EXACT


def test_weights_that_diverged_fail_their_own_policy_only(policies: dict[str, Policy]) -> None:
    engine = shared(policies)
    policies["checker"].activate()
    with torch.no_grad():
        for parameter in policies["checker"].trainable():
            parameter.fill_(float("nan"))
    requests = [asking(3 * n + 1, NAMES[n % 4], random_ids(9, n), max_tokens=8) for n in range(8)]
    for one in requests:
        engine.submit(one)
    ended: dict[int, Chunk] = {}
    failed: list[int] = []
    while engine.active:
        for event in engine.step():
            if isinstance(event, Failed):
                assert "diverged" in event.message
                failed.append(event.request_id)
            elif isinstance(event, Ended):
                ended[event.request_id] = event.chunk
    assert {requests[n // 3].policy for n in failed} == {"checker"}
    assert len(failed) == 2
    assert worst(policies, [one for one in requests if one.policy != "checker"], ended) < EXACT


def test_adapters_of_other_ranks_and_layers_mix_and_dora_takes_turns(tiny_model_dir: Path, tmp_path: Path) -> None:
    shapes: dict[str, dict[str, Any]] = {
        "checker": {"r": 8, "target_modules": ["q_proj", "down_proj"]},
        "judge": {"r": 4, "target_modules": "all-linear", "use_dora": True},
    }
    for name, shape in shapes.items():
        base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
        with peft_calls_deprecated_names():
            adapter = get_peft_model(base, LoraConfig(**shape, lora_alpha=12, task_type="CAUSAL_LM"))
        adapter.save_pretrained(str(tmp_path / name))
    policies = four(tiny_model_dir, **{name: str(tmp_path / name) for name in shapes})
    engine = shared(policies)
    requests = mixed(4, max_tokens=10)
    assert worst(policies, requests, run(engine, requests)) < EXACT
    assert passes_of_a_step(engine, policies) == [["judge"], ["solver", "checker", "base"]]


def passes_of_a_step(engine: TorchEngine, policies: dict[str, Policy]) -> list[list[str]]:
    """Which policies' rows are computed together."""
    numbers = np.arange(len(NAMES))
    return sorted([NAMES[n] for n in chosen] for chosen in engine.policies.passes(numbers))


@pytest.mark.parametrize("build", ["experts", "hybrid"])
def test_models_that_give_layers_no_rows_take_turns(build: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Shared experts are given all tokens in one list; a hybrid's contexts are computed one by one anyway."""
    save(experts() if build == "experts" else hybrid(), tiny_model_dir, tmp_path)
    policies = four(tmp_path, {"experts": "all-linear", "hybrid": ["q_proj", "o_proj", "in_proj_qkvz"]}[build])
    engine = shared(policies, max_concurrency=6)
    assert engine.contexts.kind == {"experts": "slots", "hybrid": "own cache"}[build]
    requests = mixed(2, max_tokens=6)
    assert worst(policies, requests, run(engine, requests)) < EXACT
    assert passes_of_a_step(engine, policies) == sorted([name] for name in NAMES)


def experts() -> PreTrainedModel:
    config = Qwen2MoeConfig(
        **SMALL, intermediate_size=64, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return Qwen2MoeForCausalLM(config)


def save(model: PreTrainedModel, tokenizer: Path, directory: Path) -> None:
    model.generation_config.eos_token_id = 1
    model.save_pretrained(directory)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, directory)


def test_a_policy_that_is_not_there_is_refused(policies: dict[str, Policy]) -> None:
    with pytest.raises(ConfigError, match="no policy 'critic' here; there are: solver, checker, judge, base"):
        shared(policies).submit(asking(1, "critic", random_ids(3, 1)))


@pytest.fixture
def server(tiny_model_dir: Path) -> Iterable[tuple[ModelServer, socket.socket]]:
    settings = ProcessSettings(
        model=str(tiny_model_dir), policies=dict.fromkeys(TRAINED), frozen="base", lora=Lora(rank=4), device="cpu"
    )
    ours, theirs = socket.socketpair()
    yield ModelServer(settings, Inbox(theirs, in_a_process=False), theirs), ours
    ours.close()
    theirs.close()


@pytest.mark.slow
def test_a_failed_step_gives_up_what_was_computed_in_it(server: tuple[ModelServer, socket.socket]) -> None:
    """Requests of a policy that was held in it stay."""
    serving, end = server
    model = serving._hosted["base"].policy.model

    class Fragile(type(model)):
        broken = False

        def forward(self, *args: object, **kwargs: object) -> object:
            if self.broken:
                raise RuntimeError("out of memory")
            return super().forward(*args, **kwargs)

    model.__class__ = Fragile
    for n in range(8):
        serving._take(asking(n, NAMES[n % 4], random_ids(9, n), max_tokens=50, temperature=0))
    serving._hosted["judge"].unpublished = True
    Fragile.broken = True
    serving._step()
    Fragile.broken = False
    (body,) = Frames().feed(end.recv(1 << 16))
    events = to_parent.decode(body)
    assert isinstance(events, Events)
    failed = [event for event in events.events if isinstance(event, Failed) and "out of memory" in event.message]
    assert sorted(event.request_id for event in failed) == [0, 1, 3, 4, 5, 7]
    assert serving._engine.load_of("judge") == (0, 2)
    serving._do(1, MethodCall(1, Pause()).verb, "judge", serving._hosted["judge"])
    assert not serving._can_step()
