"""Several policies on one base: each learns as if it were alone, and none touches another. See also `test_shared`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch

from agentlightning.backend.embedded.client import ModelProcess
from agentlightning.backend.embedded.protocol import Lora, ProcessSettings
from agentlightning.engine.base import Chunk, SamplingParams, concat
from agentlightning.errors import ConfigError, EngineError, ModelError
from agentlightning.learner.adapters import load_policies
from agentlightning.learner.base import LossConfig, OptimParams, PackedBatch
from agentlightning.learner.policy import LoraSpec, Policy, load_policy, peft_calls_deprecated_names
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.types.call import Int32Array

from .conftest import random_ids, reference
from .test_model_process import row

EXACT = 2e-5
RATE = OptimParams(learning_rate=0.05)
LOSS = LossConfig(name="reinforce")


@pytest.fixture
def policies(tiny_model_dir: Path) -> dict[str, Policy]:
    """Two adapters whose matrices are random, so that it matters which is applied, and the base."""
    torch.set_num_threads(1)
    found = load_policies(
        tiny_model_dir, {"solver": None, "checker": None}, frozen="base", lora=LoraSpec(rank=4), device="cpu"
    )
    torch.manual_seed(1)
    for policy in found.values():
        policy.activate()
        with torch.no_grad():
            for parameter in policy.trainable():
                parameter.normal_(std=0.1)
    return found


def plain(policy: Policy, prompt: Int32Array, response: Int32Array) -> np.ndarray:
    policy.activate()
    return reference(policy, prompt, response)


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    """Of everything in the model, all adapters included."""
    return {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}


def test_a_step_of_one_policy_leaves_the_others_and_the_base_bit_identical(policies: dict[str, Policy]) -> None:
    learners = {}
    for name in ("solver", "checker"):
        policies[name].activate()
        learners[name] = TorchLearner(policies[name])
    batches = {name: row(random_ids(9, n), _response(n)) for n, name in enumerate(learners)}
    for name in learners:  # both have gradients before either steps
        policies[name].activate()
        learners[name].forward_backward(batches[name], LOSS)
    for name in learners:
        before = weights(policies[name])
        policies[name].activate()
        learners[name].optim_step(RATE)
        changed = {key for key, value in weights(policies[name]).items() if not torch.equal(value, before[key])}
        assert changed, name
        assert all(f".policy_{name}." in key for key in changed), changed
    assert {name: policy.version for name, policy in policies.items()} == {"solver": 1, "checker": 1, "base": 0}


def test_together_they_learn_what_each_would_learn_alone(policies: dict[str, Policy], tmp_path: Path) -> None:
    """Two steps each, taken in turn, against a policy of the same adapter that has the model for itself."""
    batches = {name: row(random_ids(9, n), _response(n)) for n, name in enumerate(("solver", "checker"))}
    learners, alone = {}, {}
    for name in batches:
        policies[name].activate()
        learners[name] = TorchLearner(policies[name])
        policies[name].export(tmp_path / name)
        alone[name] = TorchLearner(load_policy(tmp_path / name, device="cpu"))
    for _ in range(2):
        for name, batch in batches.items():
            policies[name].activate()
            for learner in (learners[name], alone[name]):
                learner.forward_backward(batch, msgspec.structs.replace(LOSS, name="ppo_clip", kl_coef=0.1))
                learner.optim_step(RATE)
    for name, batch in batches.items():
        policies[name].activate()
        np.testing.assert_allclose(learners[name].forward(batch), alone[name].forward(batch), atol=1e-6)


def test_an_export_is_a_peft_directory_and_loads_again(policies: dict[str, Policy], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    prompt, response = random_ids(7, 1), random_ids(5, 2)
    for name in ("solver", "checker"):
        policies[name].export(tmp_path / name)
    again = load_policies(
        policies["solver"].path, {n: str(tmp_path / n) for n in ("solver", "checker")}, frozen="base", device="cpu"
    )
    for name, policy in again.items():
        np.testing.assert_array_equal(plain(policy, prompt, response), plain(policies[name], prompt, response))
    base = AutoModelForCausalLM.from_pretrained(policies["solver"].path)
    with peft_calls_deprecated_names():
        peft = PeftModel.from_pretrained(base, tmp_path / "checker").eval()
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    with torch.no_grad():
        logprobs = peft(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    found = logprobs.gather(1, torch.from_numpy(response.astype(np.int64))[:, None])[:, 0].numpy()
    np.testing.assert_allclose(found, plain(policies["checker"], prompt, response), atol=EXACT)
    with pytest.raises(ModelError, match="need a base model"):
        load_policies(tmp_path / "solver", {"a": None, "b": None}, device="cpu")
    with pytest.raises(ModelError, match="no adapter for the policy 'judge'"):
        load_policies(policies["solver"].path, {"judge": str(tmp_path)}, device="cpu")
    with pytest.raises(ConfigError, match="not trained"):
        policies["base"].export(tmp_path / "base")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def process(tiny_model_dir: Path) -> AsyncIterator[ModelProcess]:
    settings = ProcessSettings(
        model=str(tiny_model_dir),
        policies={"solver": None, "checker": None},
        frozen="base",
        lora=Lora(rank=4),
        max_concurrency=4,
        learning_threads=1,
        device="cpu",
    )
    async with ModelProcess(settings) as process:
        yield process


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_policies_of_a_process_learn_apart_while_all_sample(process: ModelProcess) -> None:
    handles = {name: process.policy(name) for name in ("solver", "checker", "base")}
    prompt = random_ids(12, 3)

    async def sample(name: str, seed: int) -> Chunk:
        params = SamplingParams(max_tokens=10, seed=seed)
        return concat([chunk async for chunk in handles[name].generate(prompt, params)])

    batch = row(prompt, await sample("base", 0))
    before = {name: await handle.forward(batch) for name, handle in handles.items() if name != "base"}
    stepping, sampled = asyncio.create_task(_learn(process, "solver", batch)), []
    while not stepping.done():
        sampled += await asyncio.gather(*(sample(name, len(sampled)) for name in ("checker", "base")))
    await stepping
    assert {name: (await handle.info()).version for name, handle in handles.items()} == {
        "solver": 3,
        "checker": 0,
        "base": 0,
    }
    np.testing.assert_array_equal(await handles["checker"].forward(batch), before["checker"])
    assert np.abs(await handles["solver"].forward(batch) - before["solver"]).max() > 0.01
    for name in ("solver", "checker"):
        chunk = await sample(name, 7)
        np.testing.assert_allclose(await handles[name].forward(row(prompt, chunk)), chunk.plain_logprobs, atol=EXACT)
    again = concat([c async for c in handles["base"].generate(prompt, SamplingParams(max_tokens=10, seed=0))])
    np.testing.assert_array_equal(again.ids, batch.targets_E)
    np.testing.assert_allclose(again.plain_logprobs, batch.old_logprobs_E, atol=EXACT)
    assert {chunk.version for chunk in sampled} == {0}


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_others_are_sampled_between_a_step_and_its_publication(process: ModelProcess) -> None:
    prompt = random_ids(9, 4)

    async def sample(name: str) -> Chunk:
        params = SamplingParams(max_tokens=10, seed=3)
        return concat([chunk async for chunk in process.policy(name).generate(prompt, params)])

    version = (await process.policy("solver").info()).version
    before = await sample("checker")
    await process.policy("solver").forward_backward([row(prompt, before)], LOSS)
    await process.policy("solver").optim_step(RATE)
    waits = asyncio.create_task(sample("solver"))
    for name in ("checker", "base", "checker"):
        found = await sample(name)
        assert name == "base" or found.ids.tolist() == before.ids.tolist()
    assert not waits.done()
    assert (await process.stats()).waiting == 1
    await process.policy("solver").publish()
    changed = await waits
    assert changed.version == version + 1
    logprobs = await process.policy("solver").forward(row(prompt, changed))
    np.testing.assert_allclose(logprobs, changed.plain_logprobs, atol=EXACT)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_policy_cannot_do_is_said(process: ModelProcess) -> None:
    with pytest.raises(ConfigError, match="frozen"):
        await process.policy("base").optim_step(RATE)
    with pytest.raises(ConfigError, match="no policy 'judge' here; there are: solver, checker, base"):
        await process.policy("judge").info()
    with pytest.raises(ConfigError, match="no policy 'judge'"):
        await anext(process.policy("judge").generate(random_ids(3, 1), SamplingParams(max_tokens=1)))


async def _learn(process: ModelProcess, policy: str, batch: PackedBatch) -> None:
    for _ in range(3):
        await process.policy(policy).forward_backward([batch], LOSS)
        await process.policy(policy).optim_step(RATE)
        await process.policy(policy).publish()


def _response(seed: int) -> Chunk:
    ids, zeros = random_ids(6, 50 + seed), np.zeros(6, dtype=np.float32)
    return Chunk(ids=ids, logprobs=zeros, plain_logprobs=zeros, version=0)


# ---- adapters that come and go ---------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def base_alone(tiny_model_dir: Path) -> AsyncIterator[ModelProcess]:
    """A process that begins with the base and no adapter."""
    settings = ProcessSettings(model=str(tiny_model_dir), frozen="base", max_concurrency=4, device="cpu", seed=5)
    async with ModelProcess(settings) as process:
        yield process


@pytest.mark.asyncio(loop_scope="module")
async def test_adapters_come_and_go_and_learn_as_if_they_had_been_there(
    base_alone: ModelProcess, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Added late, beside one that leaves, or loaded from a folder: the same numbers as of one that is alone."""
    prompt = random_ids(9, 4)
    batch = row(prompt, _response(0))

    async def sample(name: str) -> Chunk:
        handle = base_alone.policy(name)
        return concat([c async for c in handle.generate(prompt, SamplingParams(max_tokens=8, seed=3))])

    async def learn(name: str) -> np.ndarray:
        handle = base_alone.policy(name)
        for _ in range(2):
            await handle.forward_backward([batch], LOSS)
            await handle.optim_step(RATE)
            await handle.publish()
        return await handle.forward(batch)

    plain = await sample("base")
    first = base_alone.policy("first")
    await first.add(Lora(rank=4), seed=7)
    np.testing.assert_array_equal((await sample("first")).ids, plain.ids)  # what a new adapter adds is nothing
    alone = await learn("first")
    await first.export(str(tmp_path / "first"))
    await base_alone.policy("second").add(Lora(rank=2, parts=["attention", "unembedding"]), seed=1)
    await base_alone.policy("again").add(Lora(rank=4), seed=7)
    await first.remove()
    with pytest.raises(ConfigError, match="no policy 'first' here; there are: base, second, again"):
        await sample("first")
    await learn("second")
    np.testing.assert_array_equal(await learn("again"), alone)
    await base_alone.policy("first").add(str(tmp_path / "first"), learns=False)
    chunks = dict(zip(NAMES, await asyncio.gather(*map(sample, NAMES)), strict=True))
    np.testing.assert_array_equal(chunks["first"].ids, chunks["again"].ids)
    np.testing.assert_allclose(chunks["first"].plain_logprobs, chunks["again"].plain_logprobs, atol=EXACT)
    np.testing.assert_array_equal(chunks["base"].ids, plain.ids)
    with pytest.raises(ConfigError, match="samples and does not learn"):
        await learn("first")
    for name in ("second", "again", "first"):
        await base_alone.policy(name).remove()
    np.testing.assert_array_equal((await sample("base")).ids, plain.ids)


NAMES = ("base", "second", "again", "first")


@pytest.mark.asyncio(loop_scope="module")
async def test_what_cannot_be_added_or_removed_is_said_and_leaves_nothing(
    base_alone: ModelProcess, tmp_path: Path
) -> None:
    one = base_alone.policy("one")
    with pytest.raises(ModelError, match="no adapter for the policy 'one'"):
        await one.add(str(tmp_path))
    await one.add(Lora(rank=2))
    with pytest.raises(ConfigError, match="There is a policy 'one' already"):
        await one.add(Lora(rank=2))
    with pytest.raises(ConfigError, match="the base model"):
        await base_alone.policy("base").remove()
    waiting = asyncio.ensure_future(
        anext(one.generate(random_ids(3, 1), SamplingParams(max_tokens=400, ignore_eos=True)))
    )
    await asyncio.sleep(0)
    await one.remove()
    with pytest.raises((EngineError, ConfigError), match=r"was removed|no policy"):
        await waiting


@pytest.mark.asyncio(loop_scope="module")
async def test_a_loss_without_its_gradients_leaves_no_trace(base_alone: ModelProcess) -> None:
    one, batch = base_alone.policy("measured"), row(random_ids(9, 4), _response(0))
    await one.add(Lora(rank=2), seed=2)
    evaluated = await one.evaluate([batch], LOSS)
    passed = await one.forward_backward([batch], LOSS)
    again = await one.evaluate([batch], LOSS)
    assert evaluated.loss == passed.loss == again.loss
    np.testing.assert_array_equal(evaluated.logprobs, passed.logprobs)
    norm = (await one.optim_step(RATE)).grad_norm
    await one.publish()
    await one.remove()
    await one.add(Lora(rank=2), seed=2)
    await one.forward_backward([batch], LOSS)
    assert (await one.optim_step(RATE)).grad_norm == norm
    await one.publish()
    await one.remove()
