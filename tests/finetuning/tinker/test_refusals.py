"""What is wrong, what is another key's, and what is hostile: named, and nobody else's trouble."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from agentlightning.finetuning.tinker import bodies
from agentlightning.finetuning.tinker.data import read_request, turn_of
from agentlightning.finetuning.tinker.futures import Promises
from agentlightning.finetuning.tinker.proto import ForwardBackwardRequest
from agentlightning.finetuning.tinker.routes import PREFIX, ROUTES
from agentlightning.finetuning.tinker.service import SequenceTurns
from agentlightning.gateway.exchange import Refusal

from .conftest import Running, Start, datum, ids, prompt, rest, tinker, training_client, types

PROTOBUF = {"content-type": "application/x-protobuf"}


def data(**inputs: Any) -> Any:
    return datum(ids(1, 5), **inputs)


def refused(client: Any, words: str, data: list[Any], loss: str, config: Any = None) -> None:
    """The request is a client's own fault, and says so; the same client goes on with what it asks next."""
    with pytest.raises(Exception, match=words):
        client.forward_backward(data, loss, config).result()
    assert client.forward_backward([datum(ids(1, 5))], "cross_entropy").result(60).metrics["tokens:sum"] == 4


CASES: dict[str, tuple[str, list[Any], str, Any]] = {
    "unknown input": (r"has 'advantages', which cross_entropy does not use", [data(advantages=np.ones(4))],
                      "cross_entropy", None),
    "missing input": (r"has no 'advantages', which ppo needs", [data(logprobs=np.ones(4))], "ppo", None),
    "another shape": (r"weights has the shape \(3,\), and target_tokens \(4,\)", [data(weights=np.ones(3))],
                      "cross_entropy", None),
    "not finite": (r"weights has a value that is no finite number", [data(weights=np.array([1, np.nan, 1, 1]))],
                   "cross_entropy", None),
    "unknown setting": (r"loss_fn_config has 'beta', which ppo does not have",
                        [data(logprobs=np.ones(4), advantages=np.ones(4))], "ppo", {"beta": 1.0}),
    "text for a number": (r"loss_fn_config\['beta'\] is 'much'; give a number",
                          [data(logprobs=np.ones(4), advantages=np.ones(4))], "dro", {"beta": "much"}),
    "bounds": (r"they are bounds of a ratio", [data(logprobs=np.ones(4), advantages=np.ones(4))], "ppo",
               {"clip_low_threshold": 0.2, "clip_high_threshold": 0.28}),
    "a loss that is not here": (r"loss_fn is 'stable_reinforce'; this server has cross_entropy", [data()],
                                "stable_reinforce", None),
    "a token that there is not": (r"data\[0\].model_input has a token that is not in 0 … 703", [datum([5, 9999, 7])],
                                  "cross_entropy", None),
    "a negative target": (r"target_tokens holds something that is no token id",
                          [types.Datum(model_input=prompt([1, 2]),
                                       loss_fn_inputs={"target_tokens": np.array([1, -1])})],
                          "cross_entropy", None),
    "more targets than tokens": (r"target_tokens has the shape \(3,\)",
                                 [types.Datum(model_input=prompt([1, 2]),
                                              loss_fn_inputs={"target_tokens": np.array([1, 2, 3])})],
                                 "cross_entropy", None),
    "too long": (r"has 600 tokens, and this model takes 512 here", [datum(ids(1, 601))],
                 "cross_entropy", None),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_data_that_cannot_be_learned_from(service: Any, case: str) -> None:
    words, given, loss, config = CASES[case]
    refused(training_client(service), words, given, loss, config)


@pytest.mark.slow
def test_settings_that_are_not_here(service: Any) -> None:
    with pytest.raises(Exception, match=r"no base model 'nowhere' here\. There are: calc, org/other"):
        training_client(service, base_model="nowhere")
    with pytest.raises(Exception, match="rank is 9000; it is from 1 to 512"):
        training_client(service, rank=9000)
    with pytest.raises(Exception, match=r"adam_params\.beta1 is 1; it is at least 0 and below 1"):
        training_client(service).optim_step(types.AdamParams(beta1=1.0)).result()
    with pytest.raises(Exception, match="optimizer_params are of 'dimuon'; this server has adamw"):
        training_client(service).optim_step(types.DimuonParams(learning_rate=0.1)).result()
    sampler = service.create_sampling_client(base_model="calc").result()
    for params, words in (
        ({"temperature": -1.0}, "temperature is at least 0"),
        ({"top_p": 0.0}, "top_p above 0"),
        ({"top_k": 0}, "top_k at least 1 or -1"),
    ):
        with pytest.raises(Exception, match=words):
            sampler.sample(prompt([1, 2]), num_samples=1, sampling_params=types.SamplingParams(**params)).result()
    with pytest.raises(Exception, match="num_samples is 0"):
        sampler.sample(prompt([1, 2]), num_samples=0, sampling_params=types.SamplingParams(max_tokens=1)).result()
    with pytest.raises(Exception, match="token that is not in 0"):
        sampler.sample(prompt([1, 99999]), num_samples=1, sampling_params=types.SamplingParams(max_tokens=1)).result()
    with pytest.raises(Exception, match="600"):
        sampler.sample(prompt(ids(1, 600)), num_samples=1, sampling_params=types.SamplingParams(max_tokens=1)).result()


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_leaves_the_weights(service: Any) -> None:
    client = training_client(service)
    huge = [datum(ids(1, 5), logprobs=np.full(4, -3e38), advantages=np.full(4, 1.0))]
    client.forward_backward(huge, "importance_sampling").result()
    with pytest.raises(Exception, match="The gradient is not finite"):
        client.optim_step(types.AdamParams()).result()


def post(running: Running, path: str, body: Any, key: str = "tml-any", **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    given = {"content-type": "application/json", "x-api-key": key, **headers}
    return httpx.post(f"{running.url}{PREFIX}{path}", content=content, headers=given, timeout=30)


@pytest.mark.slow
def test_a_field_that_would_have_no_effect_is_named(running: Running, service: Any) -> None:
    """Unless it says nothing, as a newer client's null does."""
    session = training_client(service).model_id.partition(":")[0]
    base = {"session_id": session, "model_seq_id": 50, "base_model": "calc"}
    for more, words in (
        ({"quantization": "int4"}, "quantization is not known to this server"),
        ({"lora_config": {"rank": 4, "alpha": 8}}, "lora_config.alpha is not known"),
        ({"lora_config": {"rank": "many"}}, "does not fit CreateModel"),
        ({"optimizer_config": {"type": "dimuon"}}, "optimizer_config.type is 'dimuon'"),
    ):
        answer = post(running, "/create_model", {**base, **more})
        assert answer.status_code in (400, 422)
        assert words in answer.json()["detail"]
    assert post(running, "/create_model", {**base, "newer": None, "type": "create_model"}).status_code == 200
    sampling = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {},
        "base_model": "calc",
    }
    for field, value in (
        ("record_stability_info", True),
        ("prompt_alt_tokens_k", 3),
        ("target_prompt_logprobs", {"a": 1}),
    ):
        answer = post(running, "/asample", {**sampling, field: value})
        assert f"{field} has no effect on this server" in answer.json()["detail"]
    image = {**sampling, "prompt": {"chunks": [{"type": "image", "data": "x", "format": "png"}]}}
    assert "text models" in post(running, "/asample", image).json()["detail"]


@pytest.mark.parametrize("route", [r for r in ROUTES if r.method == "POST"], ids=lambda r: r.path)
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"type": 1}', b"\x00\xff" * 50, b'{"a":' * 3000, b'{"session_id": "\\ud800"}'],
    ids=range(8),
)
def test_no_body_is_a_fault_of_ours(running: Running, route: Any, body: bytes) -> None:
    path = route.path.replace("{session}", "x").replace("{run}", "r").replace("{checkpoint:path}", "weights/c")
    for headers in ({}, {"content-type": "application/x-protobuf"}):
        answer = post(running, path, body, **headers)
        assert answer.status_code < 500, answer.text
        assert answer.status_code < 400 or answer.json()["detail"]


@pytest.mark.slow
def test_no_tensor_is_a_fault_of_ours(running: Running, service: Any) -> None:
    """Shapes, types and sizes that contradict each other."""
    client = training_client(service)
    for number, (field, value) in enumerate(
        [
            ("shape", [-1]),
            ("shape", [2**40, 2**40]),
            ("shape", [0]),
            ("dtype", 9),
            ("dtype", 4),
            ("dense", b"abc"),
            ("dense", b""),
        ]
    ):
        message = ForwardBackwardRequest(model_id=client.model_id, seq_id=number + 1, loss_fn="cross_entropy")
        one = message.data.add()
        one.model_input.add().encoded_text.tokens = np.array([1, 2], dtype=np.int32).tobytes()
        tensor = one.loss_fn_inputs["target_tokens"]
        tensor.dtype, tensor.dense = 2, np.array([1, 2]).tobytes()
        tensor.shape.extend([2])
        if field == "shape":
            del tensor.shape[:]
            tensor.shape.extend(value)
        else:
            setattr(tensor, field, value)
        answer = post(running, "/forward_backward", message.SerializeToString(), **PROTOBUF)
        assert answer.status_code == 400, (field, value, answer.text)
        assert "target_tokens" in answer.json()["detail"]
    for shape, rows, columns in (
        ([2, 2**40], [0, 1, 1], [0]),
        ([2, 3], [0, 5, 1], [0]),
        ([2, 3], [0, 1, 1], [7]),
        ([2], [0], []),
    ):
        message = ForwardBackwardRequest(model_id=client.model_id, seq_id=90, loss_fn="cross_entropy")
        one = message.data.add()
        one.model_input.add().encoded_text.tokens = np.array([1, 2], dtype=np.int32).tobytes()
        tensor = one.loss_fn_inputs["target_tokens"]
        tensor.dtype = 2
        tensor.shape.extend(shape)
        tensor.sparse_csr.values = np.array([1] * len(columns)).tobytes()
        tensor.sparse_csr.crow_indices = np.array(rows).tobytes()
        tensor.sparse_csr.col_indices = np.array(columns, dtype=np.int64).tobytes()
        answer = post(running, "/forward_backward", message.SerializeToString(), **PROTOBUF)
        assert answer.status_code == 400, (shape, answer.text)


# ---- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_key_sees_its_own_alone(start: Start) -> None:
    """Sessions, clients, promises, runs and checkpoints; what is published is read by others, and not changed."""
    server = start(admin_key="the-admin-key")
    made: list[str] = []

    async def keys() -> None:
        made.extend(server.server.keys.create(name)["value"] for name in ("a", "b"))

    server.run(keys())
    with pytest.raises(Exception, match="one of its keys"):
        tinker.ServiceClient(base_url=server.url, api_key="tml-wrong").create_lora_training_client("calc").result()
    with server.client(f"tml-{made[0]}") as first, server.client(f"tml-{made[1]}") as second:
        client = training_client(first)
        path = client.save_state("mine").result().path
        sampler = client.save_weights_and_get_sampling_client().result()
        other = training_client(second)
        key = f"tml-{made[1]}"
        stolen = {
            "/get_info": {"model_id": client.model_id},
            "/optim_step": {"model_id": client.model_id, "adam_params": {}},
            "/save_weights": {"model_id": client.model_id, "path": "x"},
            "/session_heartbeat": {"session_id": client.model_id.partition(":")[0]},
            "/weights_info": {"tinker_path": path},
            "/asample": {
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
                "sampling_params": {},
                "sampling_session_id": f"{client.model_id.partition(':')[0]}:sample:0",
            },
            "/load_weights": {"model_id": other.model_id, "path": path, "optimizer": False},
            "/copy_weights": {
                "source_path": path,
                "session_id": other.model_id.partition(":")[0],
                "model_seq_id": 9,
            },
        }
        for route, body in stolen.items():
            answer = post(server, route, body, key=key)
            assert answer.status_code == 404, (route, answer.text)
        assert post(server, "/retrieve_future", {"request_id": f"{client.model_id}:1"}, key=key).status_code == 410
        api, owners = rest(second), rest(first)
        assert api.list_user_checkpoints().result().checkpoints == []
        for call in (api.get_training_run(client.model_id), api.list_checkpoints(client.model_id)):
            with pytest.raises(Exception, match="no training run"):
                call.result()
        for call in (
            api.delete_checkpoint(client.model_id, "weights/mine"),
            api.publish_checkpoint_from_tinker_path(path),
        ):
            with pytest.raises(Exception, match="no checkpoint"):
                call.result()
        owners.publish_checkpoint_from_tinker_path(path).result()
        copy = second.create_training_client_from_state(path).result()
        assert copy.model_id != client.model_id
        with pytest.raises(Exception, match="no checkpoint"):
            api.delete_checkpoint(client.model_id, "weights/mine").result()
        assert sampler.sample(
            prompt([1, 2]), num_samples=1, sampling_params=types.SamplingParams(max_tokens=1)
        ).result()


# ---- greedy clients --------------------------------------------------------------------------------------------------


def test_promises_of_one_key_have_an_end(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits, as it does where the service is busy; other keys are not held up."""
    monkeypatch.setattr("agentlightning.finetuning.tinker.futures.MOST_OPEN", 3)
    promises = running.service.promises

    async def flood() -> list[str]:
        refused: list[str] = []
        for i in range(5):
            try:
                promises.make("greedy", f"greedy:{i}", lambda: asyncio.sleep(60, b""))
            except Exception as error:
                refused.append(str(error))
        promises.make("other", "other:0", lambda: asyncio.sleep(0, b""))
        for i in range(3):
            promises.cancel("greedy", f"greedy:{i}")
        return refused

    words = running.run(flood())
    assert len(words) == 2
    assert "fetch some" in words[0]


def test_results_of_one_key_take_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were fetched make room for others; those that were not are fetched first."""
    monkeypatch.setattr("agentlightning.finetuning.tinker.futures.MOST_HELD", 10)

    async def several() -> None:
        promises = Promises()
        for number in range(2):
            promises.make("a", f"a:{number}", lambda: asyncio.sleep(0, b"x" * 6))
        await asyncio.sleep(0.01)
        with pytest.raises(Refusal, match="were not fetched take 12 bytes"):
            promises.make("a", "a:2", lambda: asyncio.sleep(0, b""))
        promises.make("b", "b:0", lambda: asyncio.sleep(0, b""))
        await promises.result("a", "a:1")
        promises.make("a", "a:2", lambda: asyncio.sleep(0, b""))
        assert await promises.result("a", "a:0") == b"x" * 6
        with pytest.raises(Refusal, match="fetched long ago"):
            await promises.result("a", "a:1")

    asyncio.run(several())


def test_a_few_bytes_become_no_array_that_fills_the_memory() -> None:
    message = ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    for _ in range(8):
        one = message.data.add()
        one.model_input.add().encoded_text.tokens = np.array([1], dtype=np.int32).tobytes()
        tensor = one.loss_fn_inputs["target_tokens"]
        tensor.dtype = 2
        tensor.shape.extend([1, 2**22])
        tensor.sparse_csr.values = np.array([1]).tobytes()
        tensor.sparse_csr.crow_indices, tensor.sparse_csr.col_indices = np.array([0, 1]).tobytes(), bytes(8)
    with pytest.raises(Refusal, match="have 33554432 cells together"):
        read_request(message.SerializeToString())
    del message.data[1:]
    tensor = message.data[0].loss_fn_inputs["target_tokens"]
    tensor.shape[:] = [1, 2**12]
    assert read_request(message.SerializeToString()).size > 2**12 * 8, "what it takes is what counts, not the body"


def test_what_a_session_keeps_is_bounded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    running = start()  # without the sessions of other tests
    monkeypatch.setattr("agentlightning.finetuning.tinker.service.MOST_SESSIONS", 2)
    assert post(running, "/create_session", {"tags": [], "user_metadata": {"a": "x" * 2**16}}).status_code == 413
    made: list[str] = []
    for _ in range(5):
        made.append(post(running, "/create_session", {"tags": []}).json()["session_id"])
        assert post(running, f"/sessions/{made[-1]}/finish", {}).status_code == 204
    assert [one for one in made if one in running.service.sessions] == made[-3:]


@pytest.mark.parametrize("number", [-1, 2**53, 10**300])
def test_a_number_that_stands_in_a_path_is_one(running: Running, number: int) -> None:
    session = post(running, "/create_session", {"tags": []}).json()["session_id"]
    named = {"session_id": session, "base_model": "calc"}
    for path, field in (("/create_model", "model_seq_id"), ("/create_sampling_session", "sampling_session_seq_id")):
        assert post(running, path, {**named, field: number}).status_code == 422
    assert post(running, f"/sessions/{session}/finish", {}).status_code == 204


def test_a_prompt_that_is_too_long_does_not_wait(running: Running) -> None:
    body = {"base_model": "calc", "prompt": {"chunks": [{"tokens": [1] * 600}]}, "sampling_params": {}}
    answer = post(running, "/asample", body)
    assert (answer.status_code, "has 600 tokens" in answer.text) == (400, True)


def test_what_work_takes_is_bounded_for_each_key(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that asks for too much waits; what has ended counts no more, and one request alone always goes."""
    monkeypatch.setattr("agentlightning.finetuning.tinker.futures.MOST_AT_ONCE", {"samples": 10})
    promises = Promises()

    async def several() -> list[int]:
        answers: list[int] = []
        for number, (owner, amount) in enumerate([("a", 12), ("a", 1), ("b", 6), ("b", 4), ("b", 1)]):
            try:
                promises.make(owner, f"{owner}:{number}", lambda: asyncio.sleep(60, b""), cost=("samples", amount))
                answers.append(200)
            except Refusal as refusal:
                answers.append(refusal.status)
        promises.cancel("a", "a:0")
        await promises.result("a", "a:0")
        promises.make("a", "a:9", lambda: asyncio.sleep(0, b""), cost=("samples", 1))
        await promises.close()
        return answers

    assert running.run(several()) == [200, 429, 200, 200, 429]


def test_clients_of_a_session_have_an_end(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.finetuning.tinker.service.MOST_CLIENTS", 2)
    session = post(running, "/create_session", {"tags": []}).json()["session_id"]
    asked = {"session_id": session, "base_model": "calc"}
    answers = [post(running, "/create_sampling_session", {**asked, "sampling_session_seq_id": n}) for n in (1, 2, 2, 3)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 400]
    assert "open another session" in answers[-1].json()["detail"]


def test_those_that_follow_the_weights_under_way_count_too(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.finetuning.tinker.service.MOST_CLIENTS", 1)
    monkeypatch.setattr("agentlightning.finetuning.tinker.service.KEPT_UNNAMED", 1)
    client = training_client(service)
    for _ in range(2):
        client.save_weights_and_get_sampling_client(kind="inflight").result()
    with pytest.raises(tinker.TinkerError, match="open another session"):
        client.save_weights_and_get_sampling_client(kind="inflight").result()


def test_what_was_fetched_counts_no_more(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests a client makes, if it fetches what comes of them; of those the last ones are kept."""
    monkeypatch.setattr("agentlightning.finetuning.tinker.futures.MOST_OPEN", 64)
    promises = Promises()

    async def many() -> None:
        for i in range(300):
            promises.make("busy", f"busy:{i}", lambda: asyncio.sleep(0, b"x"))
            assert await promises.result("busy", f"busy:{i}") == b"x"

    running.run(many())
    assert len(promises._kept) <= 128  # pyright: ignore[reportPrivateUsage]


def test_a_client_that_is_gone_leaves_no_work(running: Running) -> None:
    promises, turns = Promises(), SequenceTurns(1)

    async def waits() -> bytes:
        async with turns.turn(5):
            return b""

    async def gone() -> Any:
        promises.make("me", "s:train:1:5", waits)
        promises.make("me", "s:train:10:5", lambda: asyncio.sleep(0, b"other"))
        await asyncio.sleep(0)
        promises.cancel_all("s:train:1")
        return [await promises.result("me", f"s:train:{n}:5") for n in (1, 10)]

    cancelled, other = running.run(gone())
    assert cancelled["category"] == "user"
    assert other == b"other"


@pytest.mark.slow
def test_sessions_and_clients_have_an_end(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.finetuning.tinker.service.MOST_SESSIONS", 0)
    assert post(running, "/create_session", {"tags": []}).status_code == 429
    monkeypatch.undo()
    monkeypatch.setattr("agentlightning.finetuning.tinker.service.MOST_TRAINED", 1)
    with running.client() as service:
        training_client(service)
        with pytest.raises(Exception, match="1 clients train on calc; close some of them"):
            training_client(service)
    with running.client() as service:
        training_client(service)


@pytest.mark.slow
def test_a_session_that_ends_gives_its_memory_back(running: Running) -> None:
    with running.client() as service:
        client = training_client(service)
        client.save_weights_and_get_sampling_client().result()
        (loaded,) = [one for one in running.service.bases.loaded() if one.name == "calc"]
        assert client.model_id in loaded.trained
        folder = running.service.archive.unnamed(client.model_id, "x").parent
        assert any(folder.iterdir())
    assert client.model_id not in loaded.trained
    assert client.model_id not in running.service.training
    assert not any(folder.iterdir())
    assert post(running, "/session_heartbeat", {"session_id": client.model_id.partition(":")[0]}).status_code == 410


def test_a_session_of_which_nothing_is_heard_ends(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.finetuning.tinker.service.SESSION_SECONDS", 0.2)
    monkeypatch.setattr("agentlightning.finetuning.tinker.service._LOOK_SECONDS", 0.05)
    server = start()
    answer = post(server, "/create_session", {"tags": [], "user_metadata": None, "sdk_version": "x"})
    session = answer.json()["session_id"]
    deadline = time.monotonic() + 20
    while session in server.service.sessions:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert "open a new one" in post(server, "/session_heartbeat", {"session_id": session}).json()["detail"]


def test_sessions_are_searched_by_pages_and_finished_once(running: Running) -> None:
    names = [post(running, "/create_session", {"tags": [], "display_name": f"one {i}"}).json() for i in range(3)]
    made = [one["session_id"] for one in names]
    asked: dict[str, Any] = {"display_name": "ONE", "limit": 2}
    page = post(running, "/sessions/search", asked).json()
    assert [one["session_id"] for one in page["sessions"]] == made[:0:-1]
    rest = post(running, "/sessions/search", {**asked, "cursor": page["next_cursor"]}).json()
    assert [one["session_id"] for one in rest["sessions"]][:1] == made[:1]
    strange = {"last_session_id": "nobody", "last_created_at": "2026-01-01T00:00:00Z"}
    assert post(running, "/sessions/search", {**asked, "cursor": strange}).json()["sessions"] == []
    assert post(running, "/sessions/search", {"owner": {"type": "accessible"}}).status_code == 400
    for body in (b"{", b'{"reason": 1}'):
        assert post(running, f"/sessions/{made[0]}/finish", body).status_code == 422
    finish = {"reason": {"type": "errored"}, "detail": "x"}
    assert [post(running, f"/sessions/{one}/finish", finish).status_code for one in (made[0], made[0])] == [204, 204]
    assert running.service.sessions[made[0]].finished == "errored"
    assert "is finished" in post(running, "/session_heartbeat", {"session_id": made[0]}).json()["detail"]


def test_a_promise_is_polled_and_given_twice(running: Running) -> None:
    """A client whose connection broke asks again; one that asks too early is told to try again."""
    promises = running.service.promises
    done = asyncio.Event()

    async def work() -> bytes:
        await done.wait()
        return b"result"

    async def polled() -> list[Any]:
        promises.make("me", "slow", work)
        first = await promises.result("me", "slow", 0.01)
        assert promises.make("me", "slow", work)["request_id"] == "slow", "asked twice, done once"
        done.set()
        return [first, await promises.result("me", "slow"), await promises.result("me", "slow")]

    again, *results = running.run(polled())
    assert again == {"type": "try_again", "request_id": "slow", "queue_state": "active"}
    assert results == [b"result", b"result"]


async def test_requests_are_done_in_their_order_whenever_they_arrive() -> None:
    turns, done = SequenceTurns(1), []

    async def work(number: int | None) -> None:
        async with turns.turn(number):
            done.append(number)
            await asyncio.sleep(0)

    tasks = [asyncio.ensure_future(work(number)) for number in (3, 2, 5)]
    await asyncio.sleep(0.01)
    assert done == []
    tasks += [asyncio.ensure_future(work(number)) for number in (4, 1)]
    await asyncio.gather(*tasks)
    assert done == [1, 2, 3, 4, 5]
    with pytest.raises(Exception, match="The request 2 of this training client was made before"):
        await work(2)
    await work(None)


async def test_a_request_that_is_dropped_holds_nobody_up() -> None:
    turns = SequenceTurns(1)

    async def work(number: int) -> int:
        async with turns.turn(number):
            return number

    second, third = (asyncio.ensure_future(work(number)) for number in (2, 3))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    assert await work(1) == 1
    assert not third.done(), "its turn is not there: the client can send the second again"
    assert await work(2) == 2
    assert await third == 3


async def test_a_request_that_was_refused_holds_nobody_up() -> None:
    turns = SequenceTurns(1)

    async def work(number: int) -> int:
        async with turns.turn(number):
            turns.give_up(number)  # the same, sent twice: it is under way
            turns.give_up(number + 1)
            return number

    third, sixth = (asyncio.ensure_future(work(number)) for number in (3, 6))
    await asyncio.sleep(0)
    turns.give_up(3)  # it waits, so that it is not given up
    turns.give_up(1 << 40)
    turns.give_up(2)
    assert await work(1) == 1
    assert await third == 3
    turns.give_up(5)
    assert await sixth == 6
    with pytest.raises(Refusal, match="The request 4 of this training client was made before"):
        await work(4)


@pytest.mark.parametrize("named", [{"model_id": "s:train:0", "seq_id": 3, "adam_params": {"nonsense": 1}}, None])
def test_the_turn_of_a_body_is_read_also_where_it_is_refused(named: Any) -> None:
    body = ForwardBackwardRequest(model_id="s:train:0", seq_id=3, loss_fn="nonsense").SerializeToString()
    assert turn_of(body if named is None else msgspec.json.encode(named)) == ("s:train:0", 3)
    assert turn_of(b"\xff\xff") is turn_of(b"{") is turn_of(b'{"seq_id": null}') is None


def test_json_bodies_are_read_strictly() -> None:
    with pytest.raises(Exception, match=r"sampling_params.best_of is not known"):
        bodies.read(
            b'{"prompt": {"chunks": []}, "sampling_params": {"best_of": 3}}',
            bodies.SamplesRequest,
        )


def whole_message() -> bytes:
    message = ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    message.loss_fn_config_v2["clip_low_threshold"].number = 0.9
    for seed in range(3):
        one, tokens = message.data.add(), ids(seed, 6).astype(np.int32)
        one.model_input.add().encoded_text.tokens = tokens.tobytes()
        arrays = {
            "target_tokens": tokens.astype(np.int64),
            "logprobs": np.full(6, -1, np.float32),
            "advantages": np.ones(6, np.float32),
        }
        for name, array in arrays.items():
            tensor = one.loss_fn_inputs[name]
            tensor.dtype, tensor.dense = (2 if array.dtype == np.int64 else 1), array.tobytes()
            tensor.shape.extend([6])
    return message.SerializeToString()


def test_damaged_messages_are_refused_or_mean_something() -> None:
    """Bytes changed, taken out, put in and repeated: what is read can be packed, and all else is a refusal."""
    rng, whole = np.random.default_rng(0), whole_message()
    assert len(read_request(whole).data) == 3
    read = 0
    for _ in range(3000):
        damaged = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            at, kind = int(rng.integers(len(damaged))), rng.integers(4)
            if kind == 0:
                damaged[at] = int(rng.integers(256))
            elif kind == 1:
                del damaged[at : at + int(rng.integers(1, 9))]
            elif kind == 2:
                damaged[at:at] = rng.bytes(int(rng.integers(1, 9)))
            else:
                damaged += damaged[at : at + 40]
        try:
            passes = read_request(bytes(damaged)).passes()
        except Refusal:
            continue
        read += len(passes)
    assert read > 100


@pytest.mark.slow
def test_a_base_model_takes_as_many_tokens_as_the_server_says(start: Start) -> None:
    server = start(max_context=1 << 20)
    said = httpx.get(f"{server.url}{PREFIX}/get_server_capabilities", headers={"x-api-key": "tml-any"}).json()
    (model,) = {one["max_context_length"] for one in said["supported_models"]}
    assert model == 1024
    words = f"has {model + 1} tokens, and this model takes {model} here"
    with server.client() as client, pytest.raises(Exception, match=words):
        training_client(client).forward_backward([datum(np.full(model + 2, 5))], "cross_entropy").result(60)
