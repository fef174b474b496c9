"""Nothing that lies in a model, a checkpoint, a run or a file of settings is imported unless the user names it.

Each test leaves code that would write a file where a name in data would have it imported, and looks for that file.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.cli.configuration import make_algorithm
from agentlightning.errors import AgentLightningError, ConfigError, ModelError
from agentlightning.models import resolve_model
from agentlightning.trainer.provenance import commit_of
from tests.typed import agl as agl_command

EVIL = "import pathlib\npathlib.Path({proof!r}).touch()\nclass R:\n    pass\ndef agent(task, llm):\n    return 1.0\n"
AGENT = "def agent(task, llm):\n    return 1.0\n"


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    return tmp_path / "proof"


@pytest.fixture
def model(tmp_path: Path, proof: Path) -> Path:
    """The model that ships, with code in its folder."""
    folder = tmp_path / "nice-model"
    shutil.copytree(resolve_model("calc"), folder)
    (folder / "evil.py").write_text(EVIL.format(proof=str(proof)))
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text("1\n2\n")
    return folder


def changed(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.is_file() else {}), **values}))


RENDERERS = ["nice-model/evil.py:R", "evil:R", "nice-model.evil.R", "nice-model/evil.py", "custom", "auto"]


@pytest.mark.parametrize("name", RENDERERS)
def test_the_renderer_that_a_model_names(model: Path, proof: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from agentlightning.rendering import load_rendering

    monkeypatch.chdir(model.parent)
    monkeypatch.syspath_prepend(str(model))
    options = {"import_path": "nice-model/evil.py:R"}
    changed(model / "agentlightning.json", renderer=name, renderer_options=options)
    with pytest.raises(ModelError, match="is code"):
        load_rendering(str(model))
    assert not proof.exists()


def test_one_that_the_user_names_is_imported(model: Path, proof: Path) -> None:
    from agentlightning.rendering import load_rendering

    with pytest.raises(ModelError):  # it is no renderer, which is found out by importing it
        load_rendering(str(model), f"{model}/evil.py:R")
    assert proof.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("run", "--agent", "agent.py:agent", "--tasks", "tasks.jsonl", "--model", "./nice-model"),
        ("serve", "./nice-model", "--port", "0"),
        ("train", "--agent", "agent.py:agent", "--tasks", "tasks.jsonl", "--model", "./nice-model"),
        ("eval", "./nice-model", "--agent", "agent.py:agent", "--tasks", "tasks.jsonl"),
    ],
    ids=lambda command: command[0],
)
def test_no_command_imports_what_a_model_names(model: Path, proof: Path, command: tuple[str, ...]) -> None:
    changed(model / "agentlightning.json", renderer="nice-model/evil.py:R")
    done = agl_command(model.parent, *command)
    assert (done.returncode, proof.exists()) == (1, False), done.stderr
    assert "evil.py:R" in done.stderr + done.stdout


AUTO = {
    "AutoConfig": "evil.R",
    "AutoModelForCausalLM": "evil.R",
    "AutoTokenizer": ["evil.R", None],
}


@pytest.mark.parametrize("kind", ["unknown_kind", "qwen2"])
def test_the_classes_that_a_config_maps(model: Path, proof: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Also where somebody stands ready to say yes to a question of transformers'."""
    import io

    from agentlightning.learner.policy import load_policy
    from agentlightning.rendering import load_rendering

    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\ny\ny\n"))
    changed(model / "config.json", auto_map=AUTO, model_type=kind)
    changed(model / "tokenizer_config.json", auto_map=AUTO, tokenizer_class="R")
    (model / "tokenizer.json").rename(model / "gone")
    for load in (load_policy, load_rendering):
        with pytest.raises((AgentLightningError, AttributeError)):
            load(str(model))
    assert not proof.exists()


def test_weights_that_are_a_pickle(model: Path, proof: Path) -> None:
    from agentlightning.learner.policy import load_policy

    class Opens:
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(proof), "w")

    for file in model.glob("*.safetensors*"):
        file.unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Opens(), protocol=2))
    with pytest.raises(ModelError):
        load_policy(str(model))
    assert not proof.exists()


def test_attention_of_a_hub(model: Path) -> None:
    from agentlightning.learner.policy import load_policy

    changed(model / "config.json", attn_implementation="somebody/kernel")
    with pytest.raises(ModelError, match="code of a hub"):
        load_policy(str(model))


def test_the_modules_that_an_adapter_names(model: Path, proof: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentlightning.learner.policy import LoraSpec, load_policy

    monkeypatch.syspath_prepend(str(model))
    adapter = model.parent / "adapter"
    load_policy(str(model), lora=LoraSpec(rank=2)).export(adapter)
    named = {"auto_mapping": {"base_model_class": "R", "parent_library": "evil"}}
    changed(adapter / "adapter_config.json", megatron_core="evil", megatron_config={"a": 1}, **named)
    with pytest.raises((AgentLightningError, ValueError)):
        load_policy(str(adapter))
    assert not proof.exists()


@pytest.fixture
def run(tmp_path: Path, proof: Path) -> Path:
    """Somebody else's run, with code in its folder that it names as its agent."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "evil.py").write_text(EVIL.format(proof=str(proof)))
    (folder / "tasks.jsonl").write_text("1\n2\n")
    changed(folder / "run.json", run_id="r", algorithm="GRPO", settings={}, source=f"{folder}/evil.py", agent="agent")
    return folder


NAMED: dict[str, dict[str, Any]] = {
    "agent": {},
    "loss": {"loss": "evil:agent"},
    "renderer": {"renderer": "theirs/evil.py:R"},
    "command": {"backend": "vllm", "backend_options": {"command": "theirs/evil.py"}},
    "env": {"backend": "vllm", "backend_options": {"env": {"LD_PRELOAD": "evil.so"}}},
}


@pytest.mark.parametrize("what", NAMED)
def test_what_a_run_names(run: Path, proof: Path, what: str) -> None:
    changed(run / "run.json", settings=NAMED[what])
    (run.parent / "agent.py").write_text(AGENT)
    agent = [] if what == "agent" else ["--agent", "agent.py:agent"]
    done = agl_command(run.parent, "train", "--config", "theirs/run.json", *agent, PYTHONPATH=str(run))
    assert (done.returncode, proof.exists()) == (1, False), done.stderr
    assert "--trust" in done.stderr
    assert "evil" in done.stderr


@pytest.mark.parametrize("what", ["loss", "renderer", "command"])
def test_what_a_file_of_settings_names(run: Path, proof: Path, what: str) -> None:
    (run / "settings.json").write_text(json.dumps(NAMED[what]))
    command = ("train", "--config", "theirs/settings.json", "--print-config")
    done = agl_command(run.parent, *command, PYTHONPATH=str(run))
    assert (done.returncode, proof.exists(), "--trust" in done.stderr) == (1, False, True), done.stderr


def test_trust_imports_it_and_so_does_naming_it(run: Path, proof: Path) -> None:
    (run / "settings.json").write_text(json.dumps({"loss": "evil:agent"}))
    command = ("train", "--config", "theirs/settings.json", "--print-config")
    for more in (("--trust",), ("--set", "loss=evil:agent")):
        proof.unlink(missing_ok=True)
        done = agl_command(run.parent, *command, *more, PYTHONPATH=str(run))
        assert (done.returncode, proof.exists()) == (0, True), done.stderr


def test_eval_of_somebody_elses_run(run: Path, model: Path, proof: Path) -> None:
    checkpoint = run / "checkpoints" / "step-000001"
    shutil.copytree(model, checkpoint / "model")
    changed(checkpoint / "checkpoint.json", step=1, seed=0, base_model=str(model))
    done = agl_command(run.parent, "eval", "theirs", "--tasks", "tasks.jsonl")
    assert (done.returncode, proof.exists(), "--trust" in done.stderr) == (1, False, True), done.stderr
    changed(run / "run.json", settings={"renderer": "theirs/evil.py:R"})
    done = agl_command(run.parent, "eval", "theirs", "--tasks", "tasks.jsonl", "--agent", "agent.py:agent")
    assert (done.returncode, proof.exists(), "--trust" in done.stderr) == (1, False, True), done.stderr


def test_whatif_of_somebody_elses_run(run: Path, proof: Path) -> None:
    asyncio.run(_empty_store(run / "store.db"))
    changed(run / "run.json", settings={"loss": "evil:agent"})
    done = agl_command(run.parent, "whatif", "theirs", PYTHONPATH=str(run))
    assert (done.returncode, proof.exists(), "--trust" in done.stderr) == (1, False, True), done.stderr


async def _empty_store(file: Path) -> None:
    store = agl.SqliteLightningStore(file)
    await store.query_rollouts()
    await store.close()


def test_a_repository_that_a_command_stands_in(tmp_path: Path, proof: Path) -> None:
    """The settings of a repository name programs that `git status` runs."""
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "a").write_text("1")
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    subprocess.run(["git", "add", "a"], cwd=tmp_path, check=True)
    subprocess.run(["git", *who, "commit", "-qm", "first"], cwd=tmp_path, check=True)
    subprocess.run(["git", "config", "core.fsmonitor", f"touch {proof}; false"], cwd=tmp_path, check=True)
    assert commit_of(tmp_path, changes=False)
    assert not proof.exists()


@pytest.mark.parametrize("text", ["!!python/object/apply:os.system ['touch PROOF']", "!!python/name:os.system"])
def test_yaml_that_makes_objects(tmp_path: Path, proof: Path, text: str) -> None:
    (tmp_path / "settings.yaml").write_text(f"loss: {text.replace('PROOF', str(proof))}\n")
    done = agl_command(tmp_path, "train", "--config", "settings.yaml", "--print-config")
    assert (done.returncode, proof.exists()) == (1, False), done.stderr


ADDRESSES = [
    ({"algorithm": "Distill", "teacher": "m", "teacher_url": "http://evil/v1"}, "AGL_TEACHER_KEY"),
    ({"algorithm": "Distill", "teacher": {"model": "m", "url": "http://evil/v1"}}, "AGL_TEACHER_KEY"),
    ({"group_judge": {"base_url": "http://evil/v1", "model": "m"}}, "AGL_JUDGE_KEY"),
]


@pytest.mark.parametrize(("settings", "key"), ADDRESSES)
def test_a_key_goes_to_no_address_that_a_file_names(
    settings: dict[str, Any], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "theirs.json"
    changed(file, **settings)
    monkeypatch.delenv(key, raising=False)
    make_algorithm(None, None, file, [])
    monkeypatch.setenv(key, "sk-mine")
    with pytest.raises(ConfigError, match=f"http://evil/v1 .it gets your {key}.*--trust"):
        make_algorithm(None, None, file, [])
    make_algorithm(None, None, file, [], trust=True)
