"""A checkpoint leaves the tool: as it is, merged, as a GGUF file read back by another loader, and pushed to a hub."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentlightning.algorithm.checkpoint import CheckpointInfo, write_cards
from agentlightning.cli.commands.serve import ExportOptions
from agentlightning.cli.export_model import export_model
from agentlightning.errors import ConfigError, ModelError
from agentlightning.metrics.card import model_card
from agentlightning.models import resolve_model
from tests.typed import agl

ABOUT = {
    "algorithm": "GRPO",
    "agent": "calc_agent",
    "version": "0.3.0",
    "tasks": 2000,
    "tasks_hash": "abc123",
    "settings": {"steps": 40, "learning_rate": 2e-4, "loss": "ppo_clip", "lora_rank": None},
}
ROWS: list[dict[str, Any]] = [
    {"step": 0, "val_reward": 0.1, "val_low": 0.05, "val_high": 0.15},
    *({"step": n, "reward": n / 50} for n in range(1, 41)),
    {"step": 40, "reward": 0.8, "val_reward": 0.75, "val_low": 0.7, "val_high": 0.8},
    {"step": 41, "reward": 0.99},
]


def make_checkpoint(run: Path, model: Path, **info: Any) -> Path:
    """A run's folder with one checkpoint of step 40 that holds this model."""
    checkpoint = run / "checkpoints" / "step-000040"
    shutil.copytree(model, checkpoint / "model")
    (run / "run.json").write_text(json.dumps(ABOUT))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    told = CheckpointInfo(step=40, base_model="calc", seed=0, **info)
    write_cards(run, checkpoint, told)
    (checkpoint / "checkpoint.json").write_text(json.dumps({"step": 40, "base_model": "calc", "seed": 0, **info}))
    return checkpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "run", Path(resolve_model("calc")))
    return tmp_path / "run"


# ---- cards -----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_carries_a_card(run: Path) -> None:
    card = (run / "checkpoints" / "step-000040" / "model" / "README.md").read_text()
    assert card.startswith('---\nlibrary_name: "transformers"\n')
    for said in ("`calc` after 40 steps of GRPO", "2,000 (hash abc123)", "| learning_rate | 0.0002 |", "calc_agent"):
        assert said in card
    assert "| 40 | 0.800 | 0.750 (95 % interval 0.700 to 0.800) |" in card
    assert "0.990" not in card, "that is a later step"
    assert "AutoModelForCausalLM.from_pretrained(PATH)" in card
    assert "lora_rank" not in card, "what is not set is not said"
    assert len([line for line in card.splitlines() if line.startswith("| ")]) < 30


def test_a_card_gives_no_path_away_and_no_markup() -> None:
    about = {"agent": "<script>|x", "settings": {}}
    card = model_card(about, [], step=1, base="/home/me/secret/my-model", kind="adapter")
    assert "/home/me" not in card
    assert "my-model" in card
    assert "<script>" not in card
    assert 'library_name: "peft"' in card
    assert "AutoPeftModelForCausalLM" in card
    assert "base_model" not in card, "it is nowhere on the Hub"
    assert 'base_model: "Qwen/Qwen3-0.6B"' in model_card({}, [], step=1, base="Qwen/Qwen3-0.6B", kind="weights")


# ---- folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_is_exported_as_it_is(run: Path, tmp_path: Path) -> None:
    done = agl(tmp_path, "export", str(run), "--to", "out")
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in done.stdout
    kept = run / "checkpoints" / "step-000040" / "model"
    for file in kept.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    again = agl(tmp_path, "export", str(run), "--to", "out")
    assert again.returncode == 1
    assert "is there already" in again.stderr


def test_what_cannot_be_exported_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--to FOLDER"):
        export_model(ExportOptions(source=str(run)))
    with pytest.raises(ConfigError, match="one policy alone"):
        export_model(ExportOptions(source=str(run), to=tmp_path / "x", policy="solver"))
    with pytest.raises(ConfigError, match="no folder on this machine"):
        export_model(ExportOptions(source="some/model", to=tmp_path / "x"))
    several = tmp_path / "several" / "checkpoints" / "step-000001"
    for name in ("checker", "solver"):
        (several / "model" / name).mkdir(parents=True)
        (several / "model" / name / "adapter_config.json").write_text("{}")
    (several / "checkpoint.json").write_text('{"step": 1, "base_model": "calc", "seed": 0}')
    with pytest.raises(ConfigError, match="checker, solver"):
        export_model(ExportOptions(source=str(tmp_path / "several"), to=tmp_path / "x"))
    export_model(ExportOptions(source=str(tmp_path / "several"), to=tmp_path / "solver", policy="solver"))
    assert (tmp_path / "solver" / "adapter_config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("modules", ["all-linear", ["q_proj", "lm_head"]], ids=["linear", "output"])
def test_an_adapter_is_merged_into_its_base(tmp_path: Path, modules: str | list[str]) -> None:
    """Also one of the output layer, which shares its weights with the embedding."""
    import torch
    from transformers import AutoModelForCausalLM

    from agentlightning.learner.policy import LoraSpec, load_policy

    pytest.importorskip("gguf")
    policy = load_policy("calc", device="cpu", lora=LoraSpec(rank=4, target_modules=modules))
    with torch.no_grad():
        for name, parameter in policy.peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    policy.export(tmp_path / "adapter")
    make_checkpoint(tmp_path / "run", tmp_path / "adapter", lora_rank=4)
    card = (tmp_path / "run" / "checkpoints" / "step-000040" / "model" / "README.md").read_text()
    assert "A LoRA adapter on `calc`" in card, "not peft's template"
    ids = torch.arange(20)[None]
    with torch.no_grad():
        wanted = policy.model(ids).logits
        base = load_policy("calc", device="cpu").model(ids).logits
        export_model(ExportOptions(source=str(tmp_path / "run"), to=tmp_path / "merged", merged=True))
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
        export_model(ExportOptions(source=str(tmp_path / "run"), to=tmp_path / "gguf", gguf=True))
        config = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").config
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "gguf", gguf_file="model.gguf", config=config)(
            ids
        ).logits
    assert not torch.allclose(wanted, base, atol=0.1)
    assert torch.allclose(found, wanted, atol=1e-4)
    assert torch.allclose(read, wanted, atol=1e-4)
    assert "A LoRA adapter, merged into `calc`" in (tmp_path / "merged" / "README.md").read_text()
    assert 'library_name: "gguf"' in (tmp_path / "gguf" / "README.md").read_text()


# ---- GGUF ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), [("Llama", "float32"), ("Qwen2", "bfloat16"), ("Qwen3", "float32")])
def test_transformers_reads_the_file_as_the_same_model(tmp_path: Path, kind: str, dtype: str) -> None:
    """An independent loader: it turns names and heads back in its own way."""
    import torch
    import transformers

    from agentlightning.learner.gguf_file import export_gguf

    pytest.importorskip("gguf")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 704, "max_position_embeddings": 64, "tie_word_embeddings": False}
    ids_of = {"eos_token_id": 697, "bos_token_id": None, "pad_token_id": 695, "head_dim": 8}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, **more, **ids_of)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(getattr(torch, dtype))
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)  # biases and norms too
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model("calc"))
    model.save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf")
    export_gguf(tmp_path / "hf", tmp_path / "model.gguf")
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", config=config, dtype="float32"
    )
    text = "<|im_start|>user\nWhat's 12 * 7, and naïve “quotes”?<|im_end|>\n"
    other = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert other(text).input_ids == ids[0].tolist()
    assert other.chat_template == tokenizer.chat_template
    with torch.no_grad():
        assert torch.allclose(read(ids).logits, model.float()(ids).logits, atol=1e-5)


@pytest.mark.slow
def test_llama_cpp_samples_the_same_tokens(tmp_path: Path) -> None:
    """llama.cpp itself: its tokens, its log-probs, its tokeniser and its chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pytest.importorskip("gguf")
    llama = pytest.importorskip("xllamacpp")
    export_model(ExportOptions(source="calc", to=tmp_path / "gguf", gguf=True))
    parameters = llama.CommonParams()
    parameters.model.path = str(tmp_path / "gguf" / "model.gguf")
    parameters.n_ctx, parameters.n_parallel, parameters.cpuparams.n_threads = 512, 1, 1
    server = llama.Server(parameters)
    model: Any = AutoModelForCausalLM.from_pretrained(resolve_model("calc"))
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("calc"))
    for question in ("How much is 7 + 8?", "What's 12 * (3 + 41), and naïve “quotes”?"):
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        ids = torch.tensor([prompt])
        with torch.no_grad():
            sampled = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
            logprobs = model(sampled).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted = sampled[0, len(prompt) :].tolist()
        how = {"temperature": 0, "max_tokens": 24, "logprobs": True, "top_logprobs": 1}
        answer = server.handle_chat_completions({"messages": messages, **how})
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        found = answer["choices"][0]["logprobs"]["content"]
        assert [token["id"] for token in found] == wanted
        for row, token in zip(logprobs, found, strict=True):
            assert token["logprob"] == pytest.approx(float(row[token["id"]]), abs=0.02)


@pytest.mark.slow
def test_a_model_that_gguf_cannot_hold_here_is_refused_with_the_way_out(tmp_path: Path) -> None:
    import transformers

    from agentlightning.learner.gguf_file import export_gguf

    pytest.importorskip("gguf")
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=704, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "hf")
    transformers.AutoTokenizer.from_pretrained(resolve_model("calc")).save_pretrained(tmp_path / "hf")
    with pytest.raises(ModelError, match=r"'gpt2'.*--merged.*convert_hf_to_gguf"):
        export_gguf(tmp_path / "hf", tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


# ---- the Hub ---------------------------------------------------------------------------------------------------------


class FakeHub(BaseHTTPRequestHandler):
    """As much of the Hub as a push needs: repositories, and commits with files inside them."""

    files: dict[str, bytes]
    token: str

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Bearer {self.token}":
            return self._say(401, {"error": "Invalid username or password."})
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            self.server.made.append(asked)  # pyright: ignore[reportAttributeAccessIssue]
            return self._say(200, {"url": f"{self._here()}/{asked.get('organization', 'me')}/{asked['name']}"})
        if "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            how = {"uploadMode": "regular", "shouldIgnore": False}
            return self._say(200, {"files": [{"path": f["path"], **how} for f in asked]})
        if "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines() if line.strip()]
            for line in lines:
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self._say(
                200, {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self._here()}/me/x/commit/0"}
            )
        return self._say(200, {})

    def do_GET(self) -> None:
        self._say(200, {"id": "me/calc", "sha": "0" * 40, "siblings": [], "private": True})

    def _here(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"  # pyright: ignore[reportAttributeAccessIssue]

    def _say(self, status: int, answer: Any) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def hub() -> Iterator[tuple[str, dict[str, bytes], list[Any]]]:
    """Its address, the files that were pushed, and the repositories that were made."""
    files: dict[str, bytes] = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (FakeHub,), {"files": files, "token": "hf_right"}))
    server.made = []  # pyright: ignore[reportAttributeAccessIssue]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", files, server.made  # pyright: ignore[reportAttributeAccessIssue]
    server.shutdown()
    server.server_close()


def pushed(folder: Path, run: Path, address: str, token: str) -> Any:
    environment = {"HF_ENDPOINT": address, "HF_TOKEN": token, "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder / "hf")}
    return agl(folder, "export", str(run), "--push", "me/calc", **environment)


@pytest.mark.slow
def test_a_model_is_pushed(run: Path, tmp_path: Path, hub: tuple[str, dict[str, bytes], list[Any]]) -> None:
    address, files, made = hub
    done = pushed(tmp_path, run, address, "hf_right")
    assert done.returncode == 0, done.stdout + done.stderr
    assert made[0]["name"] == "calc"
    shown = made[0].get("visibility", "private" if made[0].get("private") else "public")
    assert shown == "private", "nobody is shown what he did not ask to show"
    kept = {p.name: p.read_bytes() for p in (run / "checkpoints" / "step-000040" / "model").iterdir()}
    assert files == kept
    assert address in done.stdout


@pytest.mark.slow
def test_without_a_good_token_it_says_what_to_do(
    run: Path, tmp_path: Path, hub: tuple[str, dict[str, bytes], list[Any]]
) -> None:
    address, files, _ = hub
    none = pushed(tmp_path, run, address, "")
    assert none.returncode == 1
    assert "HF_TOKEN" in none.stderr
    wrong = pushed(tmp_path, run, address, "hf_wrong")
    assert wrong.returncode == 1
    assert "Is the token valid" in " ".join(wrong.stderr.split())
    assert not files
