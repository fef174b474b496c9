"""Bodies of requests in JSON. What a client sends and this server does not know is refused by its name, unless it says
nothing: a newer client sends null for what it does not use.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from agentlightning.gateway.exchange import Refusal

Body = TypeVar("Body", bound=msgspec.Struct)
MOST_BYTES = 1 << 16
"""Of a body without tokens, whose metadata is kept."""
Number = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
"""Which one of a client's requests, or of a session's clients; it stands in names of folders."""
_SAYS_NOTHING = (None, False, 0, "", [], {})


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    type: str | None = None


class CreateSession(_Request, frozen=True, kw_only=True):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionNamed(_Request, frozen=True, kw_only=True):
    session_id: str


class FinishSession(_Request, frozen=True, kw_only=True):
    reason: dict[str, Any] | None = None
    detail: str | None = None


class LoraChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter that is trained."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @property
    def parts(self) -> list[str]:
        """Which layers have one, as `learner.adapters.modules_of` names them."""
        wanted = {"attention": self.train_attn, "mlp": self.train_mlp, "unembedding": self.train_unembed}
        return [part for part, wants in wanted.items() if wants]


class OptimizerChoice(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "adamw"


class CreateModel(_Request, frozen=True, kw_only=True):
    session_id: str
    model_seq_id: Number
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraChoice | None = None
    optimizer_config: OptimizerChoice = OptimizerChoice()


class ModelNamed(_Request, frozen=True, kw_only=True):
    model_id: str


class AdamParams(msgspec.Struct, frozen=True, kw_only=True):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class StepRequest(_Request, frozen=True, kw_only=True):
    model_id: str
    seq_id: Number | None = None
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(_Request, frozen=True, kw_only=True):
    model_id: str
    path: str | None = None
    seq_id: Number | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(_Request, frozen=True, kw_only=True):
    model_id: str
    path: str | None = None
    sampling_session_seq_id: Number | None = None
    kind: str = "snapshot"
    seq_id: Number | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class SaveExternal(_Request, frozen=True, kw_only=True):
    model_id: str
    path: str
    seq_id: Number | None = None
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None


class LoadWeights(_Request, frozen=True, kw_only=True):
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerChoice | None = None
    weights_access_token: str | None = None


class CreateSamplingSession(_Request, frozen=True, kw_only=True):
    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class TextChunk(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "encoded_text"
    tokens: list[int] | None = None


class TokenPrompt(msgspec.Struct, frozen=True, kw_only=True):
    chunks: list[TextChunk]


class SamplingChoice(msgspec.Struct, frozen=True, kw_only=True):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SamplesRequest(_Request, frozen=True, kw_only=True):
    prompt: TokenPrompt
    sampling_params: SamplingChoice
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: Number | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class Retrieve(_Request, frozen=True, kw_only=True):
    request_id: str
    allow_metadata_only: bool = False


class WeightsNamed(_Request, frozen=True, kw_only=True):
    tinker_path: str
    weights_access_token: str | None = None


class Lifetime(_Request, frozen=True, kw_only=True):
    ttl_seconds: int | None = None


class CopyWeights(_Request, frozen=True, kw_only=True):
    source_path: str
    session_id: str | None = None
    model_seq_id: Number | None = None
    destination_project_id: str | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class SearchSessions(_Request, frozen=True, kw_only=True):
    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    owner: dict[str, Any] | None = None
    statuses: list[dict[str, Any]] | None = None
    limit: int = 50
    cursor: dict[str, Any] | None = None


NOT_HERE = {
    "weights_access_token": "checkpoints of other accounts are read when their owner publishes them",
    "project_id": "there are no projects; a key sees its own",
    "project_ids": "there are no projects; a key sees its own",
    "destination_project_id": "there are no projects; give session_id and model_seq_id",
    "age_encryption_recipients": "files are not encrypted here",
    "target_prompt_logprobs": "take prompt_logprobs, or forward of a training client",
    "prompt_alt_tokens_k": "take topk_prompt_logprobs",
}
"""Fields of the API that are refused, with what to do."""


def read(body: bytes, kind: type[Body]) -> Body:
    """Raises `Refusal` for what is no JSON of this kind, and for fields that would have no effect."""
    try:
        given = msgspec.json.decode(body or b"{}")
        found = msgspec.convert(given, kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeError, RecursionError) as error:
        raise Refusal(f"The body does not fit {kind.__name__}: {error}.", status=422, code="invalid_body") from None
    _refuse_unknown(given, kind, "")
    return found


def _refuse_unknown(given: Any, kind: Any, where: str) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in given.items():
        if name in NOT_HERE and value not in _SAYS_NOTHING:
            raise Refusal(f"{where}{name} has no effect on this server: {NOT_HERE[name]}.", param=name)
        if name not in fields:
            if value in _SAYS_NOTHING:
                continue
            raise Refusal(f"{where}{name} is not known to this server, so it would have no effect.", param=name)
        for part in getattr(fields[name], "__args__", (fields[name],)):
            if isinstance(part, type) and issubclass(part, msgspec.Struct) and isinstance(value, dict):
                _refuse_unknown(value, part, f"{where}{name}.")
