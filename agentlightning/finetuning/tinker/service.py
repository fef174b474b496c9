"""What clients of the Tinker API ask for: sessions, and what is done by their training and sampling clients."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentlightning.backend.embedded.protocol import Lora
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.finetuning.recipe import BaseModel
from agentlightning.finetuning.records import Records
from agentlightning.finetuning.tinker import bodies
from agentlightning.finetuning.tinker.archive import SCHEME, Archive, SavedWeights
from agentlightning.finetuning.tinker.bases import MOST_TRAINED, Bases, LoadedBase
from agentlightning.finetuning.tinker.clients import SamplingClient, SequenceTurns, TinkerSession, TrainingClient
from agentlightning.finetuning.tinker.data import PassRequest, check_tokens, written
from agentlightning.finetuning.tinker.futures import Promises, Result
from agentlightning.finetuning.tinker.optimizer import check_optimizer, optim_params
from agentlightning.finetuning.tinker.sampled import sample_all, sample_response, sampling_params
from agentlightning.gateway.exchange import Refusal

logger = logging.getLogger(__name__)

SESSION_SECONDS = 1800.0
"""How long a session lasts of which nothing is heard; its client says every 10 s that it is there."""
_LOOK_SECONDS = 30.0
MOST_SESSIONS = 256
"""Of one key, at the same time."""
KEPT_UNNAMED = 32
"""Weights that a training client saved only to sample from them: so many of the last ones stay."""
MOST_CLIENTS = 4096
"""Training clients of a session, and sampling clients, besides those of unnamed weights."""
ALPHA = 32
"""Of every adapter, whatever its rank: what it adds is scaled by ALPHA / rank."""
MOST_RANK, MOST_SAMPLES = 512, 1024


class TinkerService:
    """Sessions, training clients and sampling clients, and what is done for them."""

    def __init__(
        self, models: Mapping[str, BaseModel], records: Records, folder: Path, most: int, context: int
    ) -> None:
        """`most`: base models whose processes run at the same time; `context`: tokens that each takes."""
        self.context = context
        self.bases = Bases(models, most, context)
        self.archive = Archive(records, folder, self._forget_folder)
        self.promises = Promises()
        self.sessions: dict[str, TinkerSession] = {}
        self.training: dict[str, TrainingClient] = {}
        self.sampling: dict[str, SamplingClient] = {}
        self.bases.on_death = self._forget_trained
        self.on_delete: Callable[[Path], Coroutine[Any, Any, None]] | None = None
        """What else has weights loaded, and is to forget those in a folder."""
        self._forgetting: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._looking = asyncio.create_task(self._look(), name="tinker-sessions")

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        await self.promises.close()
        await self.bases.close()

    async def _look(self) -> None:
        """End the sessions of which nothing is heard, and delete checkpoints whose time is over."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            silent = time.monotonic() - SESSION_SECONDS
            try:
                for session in [one for one in self.sessions.values() if one.last_request_at < silent]:
                    logger.info("Nothing is heard of session %s any more; it ends", session.id)
                    del self.sessions[session.id]
                    await self.end(session)
                self.archive.sweep()
            except Exception:  # such as a full disk: the next look tries again
                logger.exception("Sessions and checkpoints could not be looked through")

    def saved(self, owner: str, path: str) -> str | None:
        """The folder of the adapter that a path names, for those who serve it by another API; None for what is no
        path. Raises `Refusal` for one that there is not."""
        return str(self.archive.find(owner, path).adapter) if path.startswith(SCHEME) else None

    # ---- sessions --------------------------------------------------------------------------------------------------

    def open(self, owner: str, body: bodies.CreateSession) -> TinkerSession:
        """A new session. Raises `Refusal` where the key has too many. Of those that are finished the last ones stay."""
        mine = [one for one in self.sessions.values() if one.owner == owner]
        finished = [one.id for one in mine if one.finished is not None]
        for late in finished[: max(len(finished) - MOST_SESSIONS, 0)]:
            del self.sessions[late]
        if len(mine) - len(finished) >= MOST_SESSIONS:
            raise Refusal(f"This key has {MOST_SESSIONS} sessions; close some.", status=429, code="too_many_sessions")
        metadata = {**(body.user_metadata or {}), **({"tags": ",".join(body.tags)} if body.tags else {})}
        session = TinkerSession(
            id=secrets.token_hex(8),
            owner=owner,
            created_at=time.time(),
            metadata=metadata,
            display_name=body.display_name,
            last_request_at=time.monotonic(),
        )
        self.sessions[session.id] = session
        return session

    def session(self, owner: str, key: str) -> TinkerSession:
        """Raises `Refusal` for one that there is not, or that is another key's."""
        session = self.sessions.get(key)
        if session is None or session.owner != owner:
            raise Refusal(
                f"There is no session '{key[:100]}'. Those of an earlier start of the server are gone: open a new one.",
                status=404,
                code="not_found",
            )
        return session

    def open_session(self, owner: str, key: str) -> TinkerSession:
        """The same, of one that goes on."""
        session = self.session(owner, key)
        if session.finished is not None:
            raise Refusal(f"The session '{key}' is finished.", status=410, code="finished")
        session.last_request_at = time.monotonic()
        return session

    async def end(self, session: TinkerSession) -> None:
        """Take what it has from the models' processes. What it saved stays."""
        for key in session.training:
            await self._remove(self.training.pop(key, None))
        for key in session.sampling:
            self.sampling.pop(key, None)

    async def _remove(self, client: TrainingClient | None) -> None:
        if client is None:
            return
        self.promises.cancel_all(client.id)
        for place in client.unnamed:
            self.archive.drop(place)
        if client.loaded is not None and client.id in client.loaded.trained:
            client.loaded.trained.discard(client.id)
            with contextlib.suppress(AgentLightningError):
                await client.handle().remove()

    def _forget_trained(self, loaded: LoadedBase) -> None:
        """The clients stay, to say what became of them."""
        loaded.trained.clear()

    def _forget_folder(self, folder: Path) -> None:
        for loaded in self.bases.loaded():
            loaded.forget(folder)
        if self.on_delete is not None:
            task = asyncio.ensure_future(self.on_delete(folder))
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)

    # ---- training clients ------------------------------------------------------------------------------------------

    def create(self, owner: str, body: bodies.CreateModel) -> dict[str, Any]:
        """A promise of a training client with a new adapter."""
        base = self.bases.find(body.base_model)
        lora = body.lora_config or bodies.LoraChoice()
        if not 1 <= lora.rank <= MOST_RANK:
            raise Refusal(f"lora_config.rank is {lora.rank}; it is from 1 to {MOST_RANK}.", param="rank")
        if not lora.parts:
            raise Refusal("lora_config trains neither attention, nor MLP, nor unembedding.", param="lora_config")
        check_optimizer(body.optimizer_config)
        client = self._new_client(owner, body.session_id, body.model_seq_id, base, first=1)
        seed = secrets.randbelow(2**31) if lora.seed is None else lora.seed % 2**63

        async def work() -> Result:
            await self._host(
                client,
                Lora(rank=lora.rank, alpha=ALPHA, parts=lora.parts),
                lora.rank,
                lora.parts,
                body.session_id,
                body.user_metadata,
                seed,
            )
            return {"model_id": client.id, "type": "create_model"}

        return self.promises.make(owner, f"{client.id}:create", work, model_id=client.id)

    def _new_client(self, owner: str, session: str, number: int, base: BaseModel, *, first: int) -> TrainingClient:
        """Its client knows its id before we say it. One that was asked for before is the same one."""
        known = self.open_session(owner, session)
        key = f"{session}:train:{number}"
        if key not in self.training:
            _check_client_count(known.training)
            self.archive.check_run(owner, key)
            self.training[key] = TrainingClient(key, owner, base, SequenceTurns(first))
            known.training.append(key)
        return self.training[key]

    async def _host(
        self,
        client: TrainingClient,
        source: Lora | str,
        rank: int,
        parts: list[str],
        session: str,
        metadata: Any,
        seed: int = 0,
    ) -> None:
        loaded = await self.bases.ready(client.base.name)
        if len(loaded.trained) >= MOST_TRAINED:
            raise Refusal(
                f"{MOST_TRAINED} clients train on {client.base.name}; close some of them (ServiceClient.close)."
            )
        loaded.trained.add(client.id)
        try:
            await loaded.policy(client.id).add(source, seed=seed)
        except BaseException:
            loaded.trained.discard(client.id)
            raise
        client.loaded, client.rank = loaded, rank
        self.archive.add_run(client.owner, client.id, session, client.base.name, rank, parts, metadata)

    def client(self, owner: str, key: str) -> TrainingClient:
        """Raises `Refusal` for one that there is not, or that is another key's."""
        client = self.training.get(key)
        if client is None or client.owner != owner:
            raise Refusal(
                f"There is no training client '{key[:100]}'. Those of an earlier start of the server are gone: create "
                "one from the last saved state.",
                status=404,
                code="not_found",
            )
        self.open_session(owner, key.partition(":")[0])
        return client

    def _in_turn(
        self,
        client: TrainingClient,
        seq: int | None,
        do: Callable[[], Awaitable[Result]],
        cost: tuple[str, int] | None = None,
    ) -> dict[str, Any]:
        """A promise of what is done when it is this request's turn. A request that comes twice is done once."""

        async def work() -> Result:
            async with client.turns.turn(seq):
                self.archive.touch(client.id)
                return await do()

        number = secrets.token_hex(6) if seq is None else str(seq)
        return self.promises.make(client.owner, f"{client.id}:{number}", work, cost=cost, model_id=client.id)

    def stable_reinforce(self, key: str) -> str | None:
        """The loss that a training client's base model has instead of this one."""
        client = self.training.get(key)
        return None if client is None else client.base.stable_reinforce

    def compute(self, owner: str, body: PassRequest) -> dict[str, Any]:
        """A promise of a pass over data."""
        client = self.client(owner, body.model_id)

        async def do() -> Result:
            handle = client.handle()
            assert client.loaded is not None, "it has a handle"
            check_tokens(body.data, client.loaded.info.vocab_size, client.loaded.info.max_context)
            parts = await asyncio.to_thread(body.passes)
            compute = handle.evaluate if body.forward_only else handle.forward_backward
            return written([(data, await compute([batch], body.loss)) for data, batch in parts])

        return self._in_turn(client, body.seq_id or None, do, ("bytes of data", body.size))

    def step(self, owner: str, body: bodies.StepRequest) -> dict[str, Any]:
        """A promise of an optimiser step."""
        client = self.client(owner, body.model_id)
        params = optim_params(body)

        async def do() -> Result:
            handle = client.handle()
            result = await handle.optim_step(params)
            await handle.publish()
            return {"metrics": {"grad_norm": result.grad_norm, "step": float(result.version)}, "type": "optim_step"}

        return self._in_turn(client, body.seq_id, do)

    def save(self, owner: str, body: bodies.SaveWeights) -> dict[str, Any]:
        """A promise of a checkpoint with the optimiser's state."""
        client = self.client(owner, body.model_id)
        name = body.path or f"seq-{body.seq_id or secrets.token_hex(4)}"
        self.archive.check_new(client.id, "weights", name, body.ttl_seconds)

        async def do() -> Result:
            handle = client.handle()
            self.archive.check_new(client.id, "weights", name, body.ttl_seconds, overwrite=body.overwrite)

            async def write(place: Path) -> None:
                await handle.export(str(place / "model"))
                await handle.save_state(str(place / "optimizer"))

            row = await self.archive.save(
                owner, client.id, "weights", name, write, lifetime=body.ttl_seconds, metadata=body.user_metadata
            )
            return {"path": row["id"], "type": "save_weights"}

        return self._in_turn(client, body.seq_id, do)

    def save_to_sample(self, owner: str, body: bodies.SaveForSampler) -> dict[str, Any]:
        """A promise of weights to sample from: under a path, or as a sampling client of the session."""
        client = self.client(owner, body.model_id)
        number = body.sampling_session_seq_id
        if body.kind not in ("snapshot", "inflight"):
            raise Refusal(f"kind is {body.kind!r}; it is snapshot or inflight.", param="kind")
        if (body.path is None) == (number is None):
            raise Refusal("Give path, or sampling_session_seq_id, and not both.", param="path")
        if body.path is not None:
            self.archive.check_new(client.id, "sampler_weights", body.path, body.ttl_seconds)

        async def do() -> Result:
            handle = client.handle()

            async def write(place: Path) -> None:
                await handle.export(str(place / "model"))

            if body.path is not None:
                row = await self.archive.save(
                    owner,
                    client.id,
                    "sampler_weights",
                    body.path,
                    write,
                    lifetime=body.ttl_seconds,
                    metadata=body.user_metadata,
                )
                return {"path": row["id"], "type": "save_weights_for_sampler"}
            inflight = body.kind == "inflight"
            place = self.archive.unnamed(client.id, "inflight" if inflight else f"{number}")
            await write(place)
            if inflight and client.loaded is not None:
                await client.loaded.changed(place / "model")
            self._keep_unnamed(client, place)
            sampling = self._sample_from(client, number, place / "model")
            return {"sampling_session_id": sampling.id, "type": "save_weights_for_sampler"}

        return self._in_turn(client, body.seq_id, do)

    def _keep_unnamed(self, client: TrainingClient, place: Path) -> None:
        if place not in client.unnamed:
            client.unnamed.append(place)
        while len(client.unnamed) > KEPT_UNNAMED:
            dropped = client.unnamed.pop(0)
            self.archive.drop(dropped)
            session = self.session(client.owner, client.id.partition(":")[0])
            for key in [k for k in session.sampling if self.sampling[k].adapter == dropped / "model"]:
                session.sampling.remove(key)
                del self.sampling[key]

    def _sample_from(self, client: TrainingClient, number: int | None, adapter: Path) -> SamplingClient:
        session = self.session(client.owner, client.id.partition(":")[0])
        made = SamplingClient(
            f"{session.id}:sample:{number}", client.owner, session.id, client.base.name, adapter=adapter
        )
        if made.id not in self.sampling:
            _check_client_count(session.sampling, KEPT_UNNAMED * len(session.training))
            session.sampling.append(made.id)
        self.sampling[made.id] = made
        return made

    def save_external(self, owner: str, body: bodies.SaveExternal) -> dict[str, Any]:
        """A promise of a PEFT adapter that can be fetched."""
        client = self.client(owner, body.model_id)
        self.archive.check_new(client.id, "external_weights", body.path, body.ttl_seconds)

        async def do() -> Result:
            handle = client.handle()

            async def write(place: Path) -> None:
                await handle.export(str(place / "model"))

            row = await self.archive.save(
                owner, client.id, "external_weights", body.path, write, lifetime=body.ttl_seconds
            )
            return {"path": row["id"], "size_bytes": row["bytes"], "type": "save_weights_external"}

        return self._in_turn(client, body.seq_id, do)

    def load(self, owner: str, body: bodies.LoadWeights) -> dict[str, Any]:
        """A promise of a training client with the weights of a checkpoint: a new one, or one that there is."""
        saved = self.archive.find(owner, body.path)
        if body.optimizer and not saved.optimizer.is_dir():
            raise Refusal(f"{body.path} has no optimiser's state; it was saved to be sampled from.", param="optimizer")
        if body.optimizer_config is not None:
            check_optimizer(body.optimizer_config)
        if body.base_model not in (None, saved.run["base"]):
            raise Refusal(
                f"{body.path} is an adapter of {saved.run['base']}, not of {body.base_model}.", param="base_model"
            )
        base = self.bases.find(saved.run["base"])
        if body.model_id is not None:
            client, seq = self.client(owner, body.model_id), body.seq_id
            if client.base.name != base.name:
                raise Refusal(f"{body.path} is an adapter of {base.name}, and '{client.id}' trains {client.base.name}.")
        elif body.session_id is not None and body.model_seq_id is not None:
            client, seq = self._new_client(owner, body.session_id, body.model_seq_id, base, first=0), 0
        else:
            raise Refusal("Give model_id, or session_id and model_seq_id.", param="model_id")

        async def do() -> Result:
            if client.loaded is not None:
                await client.handle().remove()
                client.loaded.trained.discard(client.id)
                client.loaded = None
            await self._take_up(client, saved, body)
            return {"path": body.path, "model_id": client.id, "type": "load_weights"}

        return self._in_turn(client, seq, do)

    async def _take_up(self, client: TrainingClient, saved: SavedWeights, body: bodies.LoadWeights) -> None:
        parts = saved.run["parts"].split()
        session = client.id.partition(":")[0]
        await self._host(client, str(saved.adapter), saved.run["rank"], parts, session, body.user_metadata)
        if body.optimizer:
            await client.handle().load_state(str(saved.optimizer))

    # ---- sampling clients ------------------------------------------------------------------------------------------

    def sampler(self, owner: str, body: bodies.CreateSamplingSession) -> SamplingClient:
        """A sampling client of a base model or of saved weights."""
        session = self.open_session(owner, body.session_id)
        key = f"{session.id}:sample:{body.sampling_session_seq_id}"
        if key not in self.sampling:
            _check_client_count(session.sampling, KEPT_UNNAMED * len(session.training))
            self.sampling[key] = self._sampled(owner, key, session.id, body.base_model, body.model_path)
            session.sampling.append(key)
        return self.sampling[key]

    def _sampled(self, owner: str, key: str, session: str, base: str | None, path: str | None) -> SamplingClient:
        if path is None:
            return SamplingClient(key, owner, session, self.bases.find(base).name)
        saved = self.archive.find(owner, path)
        if base not in (None, saved.run["base"]):
            raise Refusal(f"{path} is an adapter of {saved.run['base']}, not of {base}.", param="base_model")
        self.bases.find(saved.run["base"])
        return SamplingClient(key, owner, session, saved.run["base"], adapter=saved.adapter, path=path)

    def sampling_client(self, owner: str, key: str) -> SamplingClient:
        """Raises `Refusal` for one that there is not, or that is another key's."""
        client = self.sampling.get(key)
        if client is None or client.owner != owner:
            raise Refusal(
                f"There is no sampling client '{key[:100]}'. Of weights without a name the last {KEPT_UNNAMED} of a "
                "training client stay; save them under a name to keep them.",
                status=404,
                code="not_found",
            )
        return client

    def sample(self, owner: str, body: bodies.SamplesRequest) -> dict[str, Any]:
        """A promise of samples."""
        if body.sampling_session_id is not None:
            client = self.sampling_client(owner, body.sampling_session_id)
            self.open_session(owner, client.session)
        else:
            client = self._sampled(owner, "", owner, body.base_model, body.model_path)
        if body.record_stability_info and self.bases.find(client.base).stable_reinforce is None:
            raise Refusal(
                "record_stability_info has no effect on this server: the loss stable_reinforce is not here.",
                param="record_stability_info",
            )
        if not 1 <= body.num_samples <= MOST_SAMPLES:
            raise Refusal(f"num_samples is {body.num_samples}; it is from 1 to {MOST_SAMPLES}.", param="num_samples")
        prompt, params = sampling_params(body, owner=client.session)
        if len(prompt) > self.context:
            raise Refusal(f"The prompt has {len(prompt)} tokens; models here take {self.context} (--max-context).")
        number = secrets.token_hex(8) if body.seq_id is None else str(body.seq_id)
        key = f"{client.id or secrets.token_hex(8)}:{number}"

        async def work() -> Result:
            loaded = await self.bases.ready(client.base)
            if client.adapter is not None and not client.adapter.is_dir():
                raise ConfigError(
                    f"The weights of this sampling client are gone: they were deleted, or {KEPT_UNNAMED} newer ones "
                    "were saved. Save them under a name to keep them."
                )
            if len(prompt) and int(prompt.max()) >= loaded.info.vocab_size:
                raise ConfigError(f"The prompt has a token that is not in 0 … {loaded.info.vocab_size - 1}.")
            async with loaded.sampling(client.adapter) as handle:
                chunks = await sample_all(handle, prompt, params)
            return sample_response(body, len(prompt), chunks)

        sequences = [f"{key}:{i}" for i in range(body.num_samples)]
        cost = ("samples", body.num_samples)
        return self.promises.make(owner, key, work, cost=cost, sample_sequence_ids=sequences)


def _check_client_count(clients: Sequence[str], besides: int = 0) -> None:
    if len(clients) >= MOST_CLIENTS + besides:
        words = f"This session has {len(clients)} clients of this kind; open another session."
        raise Refusal(words, status=400, code="too_many_clients")
