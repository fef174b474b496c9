"""What is saved, and what becomes of it: loaded, listed, copied, fetched, expired, deleted; and a server that ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.torch

from agentlightning.finetuning.jobs import Quotas
from agentlightning.finetuning.records import Records
from agentlightning.finetuning.tinker.archive import Archive
from agentlightning.gateway.exchange import Refusal

from .conftest import Running, Start, adapter_of, datum, ids, prompt, rest, tinker, training_client, types

pytestmark = pytest.mark.slow


def step(client: Any, seed: int) -> float:
    client.forward_backward([datum(ids(seed, 10))], "cross_entropy")
    return client.optim_step(types.AdamParams(learning_rate=3e-3)).result().metrics["grad_norm"]


def logprobs(client: Any, seed: int = 1) -> list[float]:
    output = client.forward([datum(ids(seed, 10))], "cross_entropy").result()
    return output.loss_fn_outputs[0]["logprobs"].to_numpy().tolist()


def test_a_client_goes_on_from_a_checkpoint_as_if_nothing_had_been(service: Any) -> None:
    """With the optimiser's state to the last bit; without it only the weights are the same."""
    whole = training_client(service)
    step(whole, 0)
    path = whole.save_state("half").result().path
    norms = [step(whole, seed) for seed in (1, 2)]
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert resumed.model_id != whole.model_id
    assert [step(resumed, seed) for seed in (1, 2)] == norms
    assert logprobs(resumed) == logprobs(whole)
    fresh = service.create_training_client_from_state(path).result()
    assert step(fresh, 1) == norms[0]
    assert step(fresh, 2) != norms[1], "the optimiser began anew"


def test_weights_are_loaded_into_a_client_that_there_is(service: Any) -> None:
    client = training_client(service)
    before = logprobs(client)
    path = client.save_state("x").result().path
    step(client, 0)
    assert logprobs(client) != before
    with pytest.warns(FutureWarning):
        client.load_state(path).result()
    assert logprobs(client) == before
    step(client, 0)


def test_names_and_lifetimes(service: Any) -> None:
    client = training_client(service)
    path = client.save_state("same").result().path
    step(client, 0)
    with pytest.raises(Exception, match="give overwrite=True"):
        client.save_state("same").result()
    client = service.create_training_client_from_state(path).result()
    first = client.save_state("same").result().path
    step(client, 3)
    assert client.save_state("same", overwrite=True).result().path == first
    for wrong in ("../up", ".hidden", "a/b", "", "x" * 200, "nul\0"):
        with pytest.raises(Exception, match=r"path|name"):
            client.save_weights_for_sampler(wrong).result()
        client = service.create_training_client_from_state(path).result()
    with pytest.raises(Exception, match="ttl_seconds is 5"):
        client.save_state("short", ttl_seconds=5).result()


def test_what_there_is_is_listed_by_pages(running: Running, service: Any) -> None:
    client = training_client(service, user_metadata={"who": "me"})
    for i in range(3):
        client.save_state(f"s{i}", ttl_seconds=7200 if i else None).result()
    client.save_weights_for_sampler("t").result()
    api = rest(service)
    run = api.get_training_run(client.model_id).result()
    assert (run.base_model, run.lora_rank, run.user_metadata) == ("calc", 8, {"who": "me"})
    assert run.last_checkpoint.checkpoint_id == "weights/s2"
    assert run.last_sampler_checkpoint.tinker_path.endswith("/sampler_weights/t")
    mine = api.list_checkpoints(client.model_id).result().checkpoints
    assert [one.checkpoint_id for one in mine] == ["sampler_weights/t", "weights/s2", "weights/s1", "weights/s0"]
    assert mine[-1].expires_at is None
    assert mine[1].expires_at is not None
    assert all(one.size_bytes for one in mine)
    page = api.list_user_checkpoints(limit=2, offset=1).result()
    assert [one.checkpoint_id for one in page.checkpoints] == ["weights/s2", "weights/s1"]
    assert page.cursor.total_count >= 4
    assert client.model_id in [one.training_run_id for one in api.list_training_runs(limit=5).result().training_runs]
    info = api.get_weights_info_by_tinker_path(mine[-1].tinker_path).result()
    assert (info.base_model, info.lora_rank, info.train_mlp, info.train_unembed) == ("calc", 8, True, True)
    session = client.model_id.partition(":")[0]
    assert client.model_id in api.get_session(session).result().training_run_ids
    assert session in api.list_sessions().result().sessions
    with pytest.warns(tinker.ExperimentalWarning):
        found = api.search_sessions(types.SessionSearchRequest(session_id=session)).result()
    assert session in [one.session_id for one in found.sessions]
    api.delete_checkpoint(client.model_id, "weights/s1").result()
    assert "weights/s1" not in [one.checkpoint_id for one in api.list_checkpoints(client.model_id).result().checkpoints]
    with pytest.raises(Exception, match="no checkpoint"):
        api.delete_checkpoint(client.model_id, "weights/s1").result()


def test_a_lifetime_ends(running: Running, service: Any) -> None:
    client = training_client(service)
    path = client.save_state("brief", ttl_seconds=3600).result().path
    folder = adapter_of(running, path)
    api = rest(service)
    api.set_checkpoint_ttl_from_tinker_path(path, 7200).result()

    async def age() -> None:
        archive = running.service.archive
        archive.change(archive.find("admin", path).row, expires_at=time.time() - 1)

    running.run(age())
    with pytest.raises(Exception, match="no checkpoint"):
        service.create_training_client_from_state(path).result()
    assert path not in [one.tinker_path for one in api.list_user_checkpoints().result().checkpoints]
    assert not folder.exists(), "it was swept"


def test_files_are_fetched_by_urls_that_need_no_key(running: Running, service: Any, tmp_path: Path) -> None:
    client = training_client(service)
    step(client, 0)
    path = client.save_weights_external("out").result().path
    api = rest(service)
    found = api.get_external_weights_urls(path).result()
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= set(found.urls)
    fetched = httpx.get(found.urls["adapter_model.safetensors"]).content
    assert fetched == (adapter_of(running, path) / "adapter_model.safetensors").read_bytes()
    assert safetensors.torch.load(fetched)
    url = found.urls["adapter_config.json"]
    until = url.split("/files/")[1].partition("-")[0]
    for wrong in (
        url.replace(f"/{until}-", f"/{int(until) + 9}-"),
        url.replace("adapter_config.json", "adapter_model.safetensors"),
        url.replace("adapter_config.json", "../../../../records.db"),
        url.replace("external_weights/out/model/adapter_config.json", "%2e%2e/%2e%2e/records.db"),
    ):
        assert httpx.get(wrong).status_code == 404, wrong


def test_saved_weights_answer_chats(running: Running, service: Any) -> None:
    """By their path as a model's name, at the server's other API; newer weights of this path from then on."""
    client = training_client(service)

    def chat(name: str) -> httpx.Response:
        body = {"model": name, "messages": [{"role": "user", "content": "3+4?"}], "max_tokens": 8, "temperature": 0}
        return httpx.post(f"{running.url}/v1/chat/completions", json={**body, "logprobs": True}, timeout=60)

    path = client.save_weights_for_sampler("chat").result().path
    first = chat(path)
    assert first.status_code == 200, first.text
    step(client, 0)
    assert client.save_weights_for_sampler("chat").result().path == path
    assert chat(path).json()["choices"][0]["logprobs"] != first.json()["choices"][0]["logprobs"]
    assert chat("tinker://nobody/weights/x").status_code == 404


def test_weights_are_copied_to_another_session(running: Running, service: Any) -> None:
    client = training_client(service)
    step(client, 0)
    path = client.save_state("origin").result().path
    with running.client() as other:
        session = training_client(other).model_id.partition(":")[0]
        given = {"session_id": session, "model_seq_id": 7, "source_path": path, "type": "copy_weights"}
        answer = httpx.post(f"{running.url}/api/v1/copy_weights", json={k: v for k, v in given.items() if k != "type"})
        assert answer.json()["tinker_path"] == f"tinker://{session}:train:7/weights/origin"
        copied = other.create_training_client_from_state_with_optimizer(answer.json()["tinker_path"]).result()
        assert logprobs(copied) == logprobs(client)


def test_a_server_that_is_started_again_has_what_was_saved(start: Start, tmp_path: Path) -> None:
    """Clients of before are told to begin from the last saved state."""
    server = start()
    with server.client() as service:
        client = training_client(service)
        step(client, 0)
        path = client.save_state("kept").result().path
        expected = logprobs(client)
        halfway = server.service.archive.folder / client.model_id.replace(":", "-") / "weights" / "halfway"
        halfway.mkdir()
        server.stop()
        again = start(port=int(server.url.rpartition(":")[2]))
        assert not halfway.exists(), "what a killed server was writing is gone"
        with pytest.raises(Exception, match="create one from the last saved state"):
            client.forward([datum(ids(1, 10))], "cross_entropy").result()
        with again.client() as newer:
            assert logprobs(newer.create_training_client_from_state_with_optimizer(path).result()) == expected
            sampler = newer.create_sampling_client(model_path=path).result()
            found = sampler.compute_logprobs(prompt(ids(1, 10))).result()[1:]
            np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_model_process_that_dies_takes_its_clients_with_it_and_nothing_else(start: Start) -> None:
    server = start()
    with server.client() as service:
        client = training_client(service)
        path = client.save_state("kept").result().path
        (loaded,) = server.service.bases.loaded()
        assert loaded.process.pid is not None
        os.kill(loaded.process.pid, signal.SIGKILL)
        with pytest.raises(Exception, match=r"create a client from the last saved state|ended by signal"):
            client.forward([datum(ids(1, 10))], "cross_entropy").result()
        again = service.create_training_client_from_state(path).result()
        assert logprobs(again)


def test_the_checkpoints_of_a_key_take_what_they_may(start: Start) -> None:
    """Deleting some makes room for others."""
    with start(quotas=Quotas(checkpoint_bytes=100_000)).client() as service:
        client = training_client(service)
        first = client.save_state("first").result().path
        with pytest.raises(tinker.TinkerError, match=r"take \d+ bytes, and they may take 100000"):
            client.save_state("second").result()
        rest(service).delete_checkpoint_from_tinker_path(first).result()
        assert client.save_state("third").result().path.endswith("third")


async def test_a_checkpoint_is_whole_or_is_not_there(tmp_path: Path) -> None:
    """A write that fails leaves the checkpoint of this name that there was."""
    records = Records(tmp_path / "records.db")
    archive = Archive(records, tmp_path / "tinker", lambda folder: None)
    archive.add_run("me", "a:train:0", "a", "calc", 8, ["mlp"], None)

    async def write(place: Path) -> None:
        (place / "model").mkdir()
        (place / "model" / "x").write_text("first")

    async def fail(place: Path) -> None:
        (place / "model").mkdir()
        raise OSError("disk full")

    await archive.save("me", "a:train:0", "weights", "n", write)
    with pytest.raises(OSError, match="disk full"):
        await archive.save("me", "a:train:0", "weights", "n", fail)
    records.close()
    records = Records(tmp_path / "records.db")
    again = Archive(records, tmp_path / "tinker", lambda folder: None)
    assert (again.find("me", "tinker://a:train:0/weights/n").adapter / "x").read_text() == "first"
    assert [p.name for p in (tmp_path / "tinker" / "a-train-0" / "weights").iterdir()] == ["n"]
    records.close()


async def test_a_key_has_so_many_runs_and_checkpoints(tmp_path: Path) -> None:
    archive = Archive(Records(tmp_path / "records.db", 2), tmp_path / "tinker", lambda folder: None)

    async def write(place: Path) -> None:
        (place / "model").mkdir()

    for run in ("a:train:0", "a:train:1", "a:train:0"):  # the same one again is no further one
        archive.check_run("me", run)
        archive.add_run("me", run, "a", "calc", 8, ["mlp"], None)
    with pytest.raises(Refusal, match="2 tinker runs on record"):
        archive.check_run("me", "a:train:2")
    archive.check_run("another", "b:train:0")
    for name in ("n", "m", "n"):
        await archive.save("me", "a:train:0", "weights", name, write)
    with pytest.raises(Refusal, match="2 tinker checkpoints on record"):
        await archive.save("me", "a:train:0", "weights", "third", write)
    assert sorted(p.name for p in (tmp_path / "tinker" / "a-train-0" / "weights").iterdir()) == ["m", "n"]
