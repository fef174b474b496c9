"""Routes, refusals, pages, keys and the life of jobs, with a trainer of no time."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agentlightning.finetuning.app import TrainingServer
from agentlightning.finetuning.jobs import Quotas
from agentlightning.finetuning.lines import LineError, Lines

from .conftest import Serve, chats, events, jsonl, pairs, polled, until, upload


def script(tmp_path: Path, **said: Any) -> None:
    (tmp_path / "served").mkdir(exist_ok=True)
    (tmp_path / "served" / "script.json").write_text(json.dumps(said))


# ---- files -----------------------------------------------------------------------------------------------------------


async def test_files_are_kept_once_by_their_content_and_read_back(serve: Serve) -> None:
    async with serve() as (server, client):
        first, second = await upload(client, chats()), await upload(client, chats())
        assert len(list(server.blobs.path("x").parent.iterdir())) == 1
        assert (await client.files.content(first)).content == jsonl(chats())
        assert [f.id async for f in client.files.list(limit=1)] == [second, first]
        assert [f.id async for f in client.files.list(limit=1, order="asc", purpose="fine-tune")] == [first, second]
        assert (await client.files.delete(first)).deleted
        assert (await client.files.content(second)).content == jsonl(chats())
        await client.files.delete(second)
        assert not list(server.blobs.path("x").parent.iterdir())
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(first)


async def test_a_file_comes_in_parts(serve: Serve) -> None:
    async with serve() as (server, client):
        data = jsonl(chats())
        made = await client.uploads.create(
            bytes=len(data), filename="f.jsonl", mime_type="application/jsonl", purpose="fine-tune"
        )
        parts = [await client.uploads.parts.create(made.id, data=piece) for piece in (data[:100], data[100:])]
        with pytest.raises(openai.BadRequestError):
            await client.uploads.complete(made.id, part_ids=[parts[0].id])
        done = await client.uploads.complete(made.id, part_ids=[p.id for p in parts])
        assert done.file is not None
        assert (await client.files.content(done.file.id)).content == data
        assert len(list(server.blobs.path("x").parent.iterdir())) == 1, "the parts are gone"
        with pytest.raises(openai.BadRequestError):
            await client.uploads.cancel(made.id)


async def test_what_has_expired_is_gone_unless_a_job_needs_it(serve: Serve, tmp_path: Path) -> None:
    script(tmp_path, steps=1000, seconds=0.05)
    async with serve() as (server, client):
        made = await client.uploads.create(bytes=9, filename="f", mime_type="text/plain", purpose="fine-tune")
        await client.uploads.parts.create(made.id, data=b"123")
        after: Any = {"anchor": "created_at", "seconds": 3600}
        ids = [
            (await client.files.create(file=("f", jsonl(chats(n))), purpose="fine-tune", expires_after=after)).id
            for n in (2, 3)
        ]
        job = await client.fine_tuning.jobs.create(model="calc", training_file=ids[0])
        await until(client, job.id, "running")
        for table in ("files", "uploads"):
            for row in server.records.rows(f"SELECT id FROM {table}"):
                server.records.change(table, row["id"], expires_at=1)
        server.files.expire()
        assert [row["id"] for row in server.records.rows("SELECT id FROM files")] == ids[:1]
        assert len(list(server.blobs.path("x").parent.iterdir())) == 1
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(ids[0])
        with pytest.raises(openai.BadRequestError):
            await client.uploads.parts.create(made.id, data=b"456")
        await client.fine_tuning.jobs.cancel(job.id)


async def test_a_file_may_be_so_large_and_all_of_a_keys_together(serve: Serve) -> None:
    async with serve(quotas=Quotas(file_bytes=1000, stored_bytes=1500)) as (server, client):
        with pytest.raises(openai.APIStatusError) as refused:
            await upload(client, b"x" * 1001)
        assert refused.value.status_code == 413
        await upload(client, b"x" * 1000)
        with pytest.raises(openai.RateLimitError):
            await upload(client, b"y" * 600)
        assert len(list(server.blobs.path("x").parent.iterdir())) == 1


async def test_no_job_is_made_where_the_checkpoints_of_a_key_take_what_they_may(serve: Serve) -> None:
    async with serve(quotas=Quotas(checkpoint_bytes=1000)) as (server, client):
        file = await client.files.create(file=("f", jsonl(chats(3))), purpose="fine-tune")
        job = await client.fine_tuning.jobs.create(model="calc", training_file=file.id)
        await client.fine_tuning.jobs.cancel(job.id)
        kept = server.jobs.folder(job.id) / "checkpoints" / "step-000001"
        kept.mkdir(parents=True)
        (kept / "model.safetensors").write_bytes(b"x" * 1000)
        with pytest.raises(openai.RateLimitError, match="checkpoint_bytes"):
            await client.fine_tuning.jobs.create(model="calc", training_file=file.id)
        (kept / "model.safetensors").unlink()
        again = await client.fine_tuning.jobs.create(model="calc", training_file=file.id)
        await client.fine_tuning.jobs.cancel(again.id)


async def test_files_that_come_at_the_same_time_count_together(serve: Serve) -> None:
    """What is on its way in is counted, so that two of which each would fit do not both come in."""
    async with serve(quotas=Quotas(file_bytes=1 << 20, stored_bytes=3 << 18)) as (server, _):
        half, both = b"x" * (1 << 18), asyncio.Event()

        async def content(number: int) -> AsyncIterator[bytes]:
            head = 'Content-Disposition: form-data; name="file"; filename="f"'
            purpose = 'Content-Disposition: form-data; name="purpose"'
            yield f"--b\r\n{purpose}\r\n\r\nfine-tune\r\n--b\r\n{head}\r\n\r\n".encode()
            yield half
            if number:
                both.set()
            await both.wait()
            await asyncio.sleep(0.05)
            yield half
            yield b"\r\n--b--\r\n"

        async with httpx.AsyncClient(base_url=server.endpoint, timeout=30) as client:
            headers = {"content-type": "multipart/form-data; boundary=b", "authorization": "Bearer any"}
            sent = [client.post("/files", content=content(number), headers=headers) for number in range(2)]
            answers = await asyncio.gather(*sent)
        assert sorted(answer.status_code for answer in answers) == [200, 429]
        assert not server.blobs.arriving
        assert server.files.stored_bytes("admin") == 1 << 19


@pytest.mark.parametrize(
    "fields",
    [
        {"purpose": "assistants"},
        {"purpose": "fine-tune", "expires_after[anchor]": "created_at", "expires_after[seconds]": "5"},
        {"purpose": "fine-tune", "colour": "red"},
        {},
    ],
)
async def test_a_form_that_cannot_be_honoured_is_refused_by_its_field(serve: Serve, fields: dict[str, str]) -> None:
    async with serve() as (server, _), httpx.AsyncClient() as http:
        headers, file = {"authorization": "Bearer x"}, {"file": ("f", b"{}")}
        answer = await http.post(f"{server.endpoint}/files", data=fields, files=file, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] in (*fields, "purpose")
        assert answer.headers["x-request-id"]


async def test_a_page_of_another_site_cannot_upload(serve: Serve) -> None:
    async with serve() as (server, _), httpx.AsyncClient() as http:
        form: Any = {"data": {"purpose": "fine-tune"}, "files": {"file": ("f", b"{}")}}
        assert (await http.post(f"{server.endpoint}/files", **form)).status_code == 415
        origin = {"origin": "https://evil.example", "authorization": "Bearer x"}
        assert (await http.post(f"{server.endpoint}/files", **form, headers=origin)).status_code == 403


# ---- jobs ------------------------------------------------------------------------------------------------------------


async def test_the_life_of_a_job(serve: Serve) -> None:
    async with serve() as (_, client):
        train = await upload(client, chats())
        job = await client.fine_tuning.jobs.create(
            model="calc", training_file=train, metadata={"team": "a"}, suffix="mine", seed=7
        )
        assert (job.status, job.seed, job.result_files) == ("validating_files", 7, [])
        done = await until(client, job.id)
        assert done.status == "succeeded"
        assert (done.hyperparameters.n_epochs, done.hyperparameters.batch_size) == (3, 1)
        said = [e.message for e in await events(client, job.id)]
        assert sum("Checkpoint created" in one for one in said) == 2
        assert any("n_epochs=3" in one for one in said), "auto: what was taken"
        steps = [c.step_number async for c in client.fine_tuning.jobs.checkpoints.list(job.id)]
        assert steps == [4, 2]
        assert done.fine_tuned_model == f"ft:calc:local:mine:{job.id[6:14]}"
        assert (await client.models.retrieve(done.fine_tuned_model)).id == done.fine_tuned_model
        again = await client.fine_tuning.jobs.create(model=done.fine_tuned_model, training_file=train)
        assert (await until(client, again.id)).status == "succeeded"
        assert [j.id async for j in client.fine_tuning.jobs.list(limit=1)] == [again.id, job.id]
        assert [j.id async for j in client.fine_tuning.jobs.list(metadata={"team": "a"})] == [job.id]
        for wrong in (client.fine_tuning.jobs.cancel, client.fine_tuning.jobs.pause, client.fine_tuning.jobs.resume):
            with pytest.raises(openai.BadRequestError) as refused:
                await wrong(job.id)
            assert refused.value.code == "invalid_state"


EXACT = {
    "type": "string_check",
    "name": "exact",
    "operation": "eq",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}",
}


def _graded(**given: Any) -> dict[str, Any]:
    reinforcement = {"grader": EXACT, **given}
    return {"method": {"type": "reinforcement", "reinforcement": reinforcement}}


REFUSED: dict[str, Any] = {
    "model": {"model": "gpt-9"},
    "training_file": {"training_file": "file-none"},
    "validation_file": {"validation_file": "file-none"},
    "suffix": {"suffix": "a:b"},
    "seed": {"seed": -1},
    "metadata": {"metadata": {"k": "v" * 513}},
    "integrations": {"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]},
    "integrations[0].wandb.project": {"integrations": [{"type": "wandb", "wandb": {}}]},
    "shape": {"shape": "round"},
    "hyperparameters.n_epochs": {"hyperparameters": {"n_epochs": 0}},
    "hyperparameters.colour": {"hyperparameters": {"colour": "red"}},
    "hyperparameters": {"hyperparameters": {"n_epochs": 1}, "method": {"type": "supervised"}},
    "method.type": {"method": {"type": "rlhf"}},
    "method.dpo": {"method": {"type": "supervised", "dpo": {}}},
    "method.dpo.hyperparameters.beta": {"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": -1}}}},
    "method.supervised.hyperparameters.beta": {
        "method": {"type": "supervised", "supervised": {"hyperparameters": {"beta": 1}}}
    },
    "method.reinforcement": {"method": {"type": "reinforcement"}},
    "method.reinforcement.grader": {"method": {"type": "reinforcement", "reinforcement": {}}},
    "method.reinforcement.grader.operation": _graded(grader={**EXACT, "operation": "about"}),
    "method.reinforcement.grader.model": _graded(
        grader={"type": "score_model", "name": "s", "model": "gpt-9", "input": [{"role": "user", "content": "?"}]}
    ),
    "method.reinforcement.agent": _graded(grader=None, agent="nobody"),
    "method.reinforcement.response_format": _graded(response_format={"type": "xml"}),
    "method.reinforcement.hyperparameters.reasoning_effort": _graded(hyperparameters={"reasoning_effort": "high"}),
}
"""By the field that the refusal names."""


@pytest.mark.parametrize("param", REFUSED)
async def test_what_cannot_be_honoured_is_refused_by_its_name(serve: Serve, param: str) -> None:
    async with serve() as (_, client):
        file = await upload(client, chats())
        asked = {"model": "calc", "training_file": file, "validation_file": file, **REFUSED[param]}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.post("/fine_tuning/jobs", body=asked, cast_to=dict[str, Any])
        assert refused.value.param == param
        assert not [j async for j in client.fine_tuning.jobs.list()]


async def test_a_refusal_says_what_a_field_takes_and_which_was_meant(serve: Serve) -> None:
    said = {
        "n_epochs is '1'; it is a whole number from 1 to 10000, or \"auto\"": {"hyperparameters": {"n_epochs": "1"}},
        "learning_rate_multiplier is 'fast'": {"hyperparameters": {"learning_rate_multiplier": "fast"}},
        "Did you mean learning_rate_multiplier?": {"hyperparameters": {"learning_rate": 1e-4}},
        "It is one of hyperparameters.": {"n_epochs": 1},
        "method.type is 'sft'; it is supervised, dpo or reinforcement": {"method": {"type": "sft"}},
        "suffix is 'my model!'; it is up to 64 letters": {"suffix": "my model!"},
        "Upload it (POST /v1/files)": {"training_file": "chats.jsonl"},
    }
    async with serve() as (_, client):
        file = await upload(client, chats())
        for words, given in said.items():
            asked = {"model": "calc", "training_file": file, **given}
            with pytest.raises(openai.BadRequestError, match=re.escape(words)):
                await client.post("/fine_tuning/jobs", body=asked, cast_to=dict[str, Any])


async def test_a_path_that_is_not_here_is_answered_with_the_one_that_was_meant(serve: Serve) -> None:
    said = {
        "GET /models": "as their base URL {}/v1",
        "GET /v1/v1/models": "as their base URL {}/v1",
        "POST /v1/chat/completions/chat/completions": "as their base URL {}/v1",
        "POST /v1/api/v1/create_session": "take the address without a path: {}",
        "POST /v1/models": "It takes GET.",
        "PUT /v1/fine_tuning/jobs": "It takes POST and GET.",
        "GET /v1/assistants": "There are /v1/files, /v1/uploads, /v1/fine_tuning/jobs, ",
    }
    async with serve() as (_, client):
        host = str(client.base_url).removesuffix("/v1/")
        for asked, words in said.items():
            method, _, path = asked.partition(" ")
            with pytest.raises(openai.APIStatusError, match=re.escape(words.format(host))):
                await getattr(client, method.lower())(host + path, cast_to=object)


LINES: dict[str, bytes] = {
    "nul": b'{"messages": []}\0\n',
    "no utf-8": b'{"messages": "\xff"}\n',
    "no json": b"hello\n",
    "no object": b"[1]\n",
    "no answer": b'{"messages": [{"role": "user", "content": "hi"}]}\n',
    "weight": b'{"messages": [{"role": "assistant", "content": "hi", "weight": 0.5}]}\n',
    "unknown": b'{"messages": [{"role": "assistant", "content": "hi"}], "colour": 1}\n',
    "parallel": b'{"messages": [{"role": "assistant", "tool_calls": [{}, {}]}], "parallel_tool_calls": false}\n',
    "endless": b"x" * (9 << 20),
    "nested": b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize(
    ("line", "method", "words"),
    [
        (b'{"prompt": "a", "completion": "b"}', "supervised", "Write its prompt and its completion as messages"),
        (b'{"conversations": [{"from": "human", "value": "a"}]}', "supervised", "This is ShareGPT's form"),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "dpo", "It must be a preference"),
        (b'[{"messages": []}]', "supervised", "Write each item of the array on a line of its own."),
    ],
)
def test_a_line_of_another_form_is_answered_with_this_one(tmp_path: Path, line: bytes, method: str, words: str) -> None:
    (tmp_path / "file").write_bytes(line)
    with pytest.raises(LineError, match=f"^Line 1: .*{re.escape(words)}"):
        Lines(tmp_path / "file", method).check()


@pytest.mark.parametrize("name", LINES)
async def test_a_line_that_cannot_be_used_fails_the_job_and_is_named(serve: Serve, name: str) -> None:
    async with serve() as (_, client):
        train = await upload(client, jsonl(chats(2)) + LINES[name])
        job = await client.fine_tuning.jobs.create(model="calc", training_file=train)
        failed = await until(client, job.id)
        assert (failed.status, failed.error.param) == ("failed", "training_file")
        assert failed.error.message.startswith("Line 3:")


async def test_a_validation_file_of_another_method_fails_the_job(serve: Serve) -> None:
    async with serve() as (_, client):
        train, val = await upload(client, pairs(3)), await upload(client, chats(3))
        method: Any = {"type": "dpo", "dpo": {}}
        job = await client.fine_tuning.jobs.create(
            model="calc", training_file=train, validation_file=val, method=method
        )
        assert (await until(client, job.id)).error.param == "validation_file"


async def test_a_job_is_paused_and_goes_on_from_its_checkpoint(serve: Serve, tmp_path: Path) -> None:
    script(tmp_path, steps=30, seconds=0.05)
    async with serve() as (server, client):
        job = (await client.fine_tuning.jobs.create(model="calc", training_file=await upload(client, chats()))).id
        await until(client, job, "running")
        await polled(lambda: client.fine_tuning.jobs.checkpoints.list(job), lambda page: bool(page.data))
        assert (await client.fine_tuning.jobs.pause(job)).status == "paused"
        await polled(lambda: asyncio.sleep(0), lambda _: server.queue.busy_with is None)
        before = len(await events(client, job))
        await asyncio.sleep(0.2)
        assert len(await events(client, job)) == before
        script(tmp_path, steps=30)
        assert (await client.fine_tuning.jobs.resume(job)).status == "queued"
        assert (await until(client, job)).status == "succeeded"
        assert sum(e.type == "metrics" for e in await events(client, job)) == 30


async def test_a_job_is_cancelled_while_it_waits_and_while_it_runs(serve: Serve, tmp_path: Path) -> None:
    script(tmp_path, steps=1000, seconds=0.05)
    async with serve() as (_, client):
        train = await upload(client, chats())
        first, second = [(await client.fine_tuning.jobs.create(model="calc", training_file=train)).id for _ in range(2)]
        await until(client, first, "running")
        await until(client, second, "queued")
        with pytest.raises(openai.BadRequestError):
            await client.files.delete(train)
        assert (await client.fine_tuning.jobs.cancel(second)).status == "cancelled"
        assert (await client.fine_tuning.jobs.cancel(first)).status == "cancelled"
        assert (await client.files.delete(train)).deleted


async def test_a_process_that_fails_or_dies_fails_its_job_and_no_other(serve: Serve, tmp_path: Path) -> None:
    async with serve() as (_, client):
        train = await upload(client, chats())
        script(tmp_path, fails="no memory")
        job = await client.fine_tuning.jobs.create(model="calc", training_file=train)
        assert (await until(client, job.id)).error.message == "no memory"
        script(tmp_path, dies_at=1)
        job = await client.fine_tuning.jobs.create(model="calc", training_file=train)
        assert (await until(client, job.id)).error.code == "training_process_died"
        script(tmp_path, steps=4, dies_at=2)  # it gets on, and is started again
        job = await client.fine_tuning.jobs.create(model="calc", training_file=train)
        assert (await until(client, job.id)).status == "succeeded"
        assert [e.level for e in await events(client, job.id)].count("warn") == 1


async def test_after_a_restart_jobs_go_on(serve: Serve, tmp_path: Path) -> None:
    script(tmp_path, steps=20, seconds=0.05)
    async with serve() as (_, client):
        train = await upload(client, chats())
        jobs = [(await client.fine_tuning.jobs.create(model="calc", training_file=train)).id for _ in range(2)]
        await until(client, jobs[0], "running")
        await asyncio.sleep(0.3)
    async with serve() as (_, client):
        for job in jobs:
            assert (await until(client, job)).status == "succeeded"
            assert sum(e.type == "metrics" for e in await events(client, job)) == 20
        assert (await client.files.retrieve(train)).status == "processed"


async def test_a_reinforcement_job_needs_a_validation_file_and_prompts(serve: Serve) -> None:
    async with serve() as (_, client):
        train = await upload(client, chats())  # which end with an answer
        asked: Any = {"model": "calc", "training_file": train, **_graded()}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.fine_tuning.jobs.create(**asked)
        assert refused.value.param == "validation_file"
        job = await client.fine_tuning.jobs.create(**asked, validation_file=train)
        assert (await until(client, job.id)).error.message.startswith("Line 1:")
        prompts = [{"messages": chat["messages"][:1], "answer": "7"} for chat in chats()]
        file = await upload(client, prompts)
        job = await client.fine_tuning.jobs.create(**{**asked, "training_file": file}, validation_file=file)
        done = await until(client, job.id)
        assert done.status == "succeeded"
        assert done.method.reinforcement.hyperparameters.eval_interval == 10


async def test_graders_are_tried(serve: Serve) -> None:
    async with serve() as (_, client):
        graders: Any = client.fine_tuning.alpha.graders
        ran = await graders.run(grader=EXACT, model_sample="7", item={"answer": "7"})
        assert (ran.reward, ran.metadata.errors.other_error) == (1.0, False)
        assert (await graders.validate(grader=EXACT)).grader.name == "exact"
        with pytest.raises(openai.BadRequestError) as refused:
            await graders.validate(grader={**EXACT, "operation": "about"})
        assert refused.value.param == "grader.operation"
        asks = {"type": "score_model", "name": "s", "model": "gpt-9", "input": [{"role": "user", "content": "?"}]}
        with pytest.raises(openai.BadRequestError, match="'gpt-9' does not exist here"):
            await graders.validate(grader=asks)


# ---- keys ------------------------------------------------------------------------------------------------------------


async def made_key(client: openai.AsyncOpenAI, name: str) -> openai.AsyncOpenAI:
    made = await client.post("/organization/admin_api_keys", body={"name": name}, cast_to=object)
    return client.with_options(api_key=made["value"])  # pyright: ignore


async def test_a_key_sees_its_own_files_jobs_and_models_only(serve: Serve) -> None:
    async with serve(key="boss", admin_key="boss") as (_, boss):
        anna, ben = await made_key(boss, "anna"), await made_key(boss, "ben")
        train = await upload(anna, chats())
        job = await anna.fine_tuning.jobs.create(model="calc", training_file=train)
        model = (await until(anna, job.id)).fine_tuned_model
        for other in (ben, boss):
            assert not [f async for f in other.files.list()]
            assert not [j async for j in other.fine_tuning.jobs.list()]
            assert model not in [m.id async for m in other.models.list()]
            with pytest.raises(openai.BadRequestError):
                await other.fine_tuning.jobs.create(model="calc", training_file=train)
            hidden = (
                other.files.retrieve(train),
                other.files.content(train),
                other.files.delete(train),
                other.fine_tuning.jobs.retrieve(job.id),
                other.fine_tuning.jobs.cancel(job.id),
                other.fine_tuning.jobs.list_events(job.id),
                other.fine_tuning.jobs.checkpoints.list(job.id),
                other.models.retrieve(model),
                other.models.delete(model),
                other.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}]),
            )
            for asked in hidden:
                with pytest.raises(openai.NotFoundError):
                    await asked
        with pytest.raises(openai.PermissionDeniedError):
            await made_key(anna, "carl")
        for wrong in ("", "sk-wrong"):
            with pytest.raises(openai.AuthenticationError):
                await boss.with_options(api_key=wrong or "x").files.list()
        listed: Any = await boss.get("/organization/admin_api_keys", cast_to=object)
        key = next(one["id"] for one in listed["data"] if one["name"] == "anna")
        await boss.delete(f"/organization/admin_api_keys/{key}", cast_to=object)
        with pytest.raises(openai.AuthenticationError):
            await anna.files.list()


async def test_keys_take_turns_and_have_so_many_open_jobs(serve: Serve, tmp_path: Path) -> None:
    script(tmp_path, steps=4, seconds=0.05)
    async with serve(key="boss", admin_key="boss", quotas=Quotas(open_jobs=3)) as (server, boss):
        anna, ben = await made_key(boss, "anna"), await made_key(boss, "ben")
        files = {client: await upload(client, chats()) for client in (anna, ben)}
        of_anna = [(await anna.fine_tuning.jobs.create(model="calc", training_file=files[anna])).id for _ in range(3)]
        with pytest.raises(openai.RateLimitError):
            await anna.fine_tuning.jobs.create(model="calc", training_file=files[anna])
        of_ben = (await ben.fine_tuning.jobs.create(model="calc", training_file=files[ben])).id
        for job in of_anna:
            await until(anna, job)
        await until(ben, of_ben)
        rows = server.records.rows("SELECT id FROM jobs ORDER BY started_at")
        assert [r["id"] for r in rows] == [of_anna[0], of_ben, *of_anna[1:]]


async def test_a_cursor_that_is_none_never_begins_anew(serve: Serve) -> None:
    async with serve() as (_, client):
        job = (await client.fine_tuning.jobs.create(model="calc", training_file=await upload(client, chats()))).id
        await until(client, job)
        for asked in (
            client.files.list(after="file-x"),
            client.fine_tuning.jobs.list(after="ftjob-x"),
            client.fine_tuning.jobs.list_events(job, after="ftevent-x"),
            client.fine_tuning.jobs.checkpoints.list(job, after="ftckpt_x"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await asked
            assert refused.value.param == "after"


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    from agentlightning.errors import ConfigError
    from agentlightning.finetuning.recipe import BaseModel

    first = TrainingServer(tmp_path, {"calc": BaseModel("calc", "calc")})
    with pytest.raises(ConfigError):
        TrainingServer(tmp_path, {"calc": BaseModel("calc", "calc")})
    first.records.close()


async def test_a_model_that_a_killed_server_was_deleting_is_gone_at_the_next_start(serve: Serve) -> None:
    async with serve() as (server, client):
        job = await client.fine_tuning.jobs.create(model="calc", training_file=await upload(client, chats()))
        await until(client, job.id)
        kept = server.jobs.folder(job.id) / "checkpoints"
        assert list(kept.iterdir())
        server.records.change("jobs", job.id, model_deleted=1)  # and then it was killed
    async with serve():
        assert not kept.exists()
