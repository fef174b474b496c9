"""The commands of the documentation, and where each of them is typed, or why nowhere.

A command is a line behind a prompt in a block for the shell, or one that is set in. `test_code_blocks.py` fails for
one that stands in no table here; `e2e/test_commands_as_typed.py` types those of `TYPED` and `SERVING` as they stand, in
the order of pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/*/README.md")])
SHELL = ("", "bash", "console", "sh")
PROMPT = re.compile(r"^(?:\w*)\$ ")
CONTINUED = re.compile(r" *\\\n *")

TYPED = {
    "applications.md": [
        "python -m examples.code.problems data/code",
        "python -m examples.math.tasks data/math",
        "python -m examples.rag.corpus data/rag",
        "python -m examples.sql.data data/sql",
        "python -m examples.terminal.repositories data/terminal",
        "python -m examples.werewolf.tasks data/werewolf",
    ],
    "cli.md": [
        'agl run --agent "python my_agent.py" --tasks tasks.jsonl --model calc',
        "agl eval runs/calc-20250101-120000 --trust",
        "agl show runs/calc-20250101-120000 --failed",
        "agl show runs/calc-20250101-120000 --step 12 --reward-max 0",
        "agl show runs/calc-20250101-120000 --group 12-0",
        "agl agents",
        "agl env list",
        "agl env check gym:FrozenLake-v1 --env-option is_slippery=false",
        "agl models",
        "agl models --gpus 2xL4",
        "agl runs",
        "agl runs my-folder --json",
        "agl compare runs/a runs/b",
        "agl compare runs/a runs/b --metric entropy",
        "agl watch runs/calc-20250101-120000",
        "agl report runs/calc-20250101-120000 --to report.html",
        "agl export runs/grpo-20250101-120000 --to my-model --merged",
        "agl export runs/grpo-20250101-120000 --to my-gguf --gguf",
        "agl export runs/grpo-20250101-120000 --jsonl good.jsonl --min-reward 1 --best-per-task",
        "agl import traces.jsonl trajectories/ --to chats.jsonl",
        "agl train --data chats.jsonl --model ./my-model",
        "agl import scored.json --to scored-chats.jsonl --min-score correctness=0.8",
        "agl plan --model 4B --gpus L4 --context 8192 --json",
        "agl doctor --agent my_agent.py:agent --tasks tasks.jsonl",
        'agl doctor --agent "node agent.js" --tasks tasks.jsonl --model ./my-model',
        "agl why runs/calc-20250101-120000",
        "agl why runs/calc-20250101-120000 --breaks",
        "agl whatif runs/calc-20250101-120000 --step 12",
        'agl whatif runs/calc-20250101-120000 --step 12 --loss gspo --set "loss=cispo clip_high=2.0" --json',
        "agl store statistics runs/calc-20250101-120000",
    ],
    "environments.md": [
        "agl env list",
        "agl env check gym:FrozenLake-v1 --env-option is_slippery=false",
    ],
    "examples/math/README.md": ["python -m examples.math.tasks data/math"],
    "examples/support/README.md": ["python -m examples.support.cases data/support"],
    "prompts.md": ["python -m examples.room_booking.tune"],
    "store.md": [
        "agl store key ROLLOUT ATTEMPT --secret-file secret --scope spans",
        "agl store --path run/store.db statistics",
        "agl store --path run/store.db export rollouts.jsonl",
        "agl store --path run/store.db export rollouts/",
        "agl store --path other.db import rollouts/",
        "agl store --path run/store.db prune --older-than 30d",
    ],
}
"""Commands that end, by page."""
SERVING = {
    "agents.md": {
        "python -m agent_lightning.server --model calc --algorithm grpo --port 8000 --config config.yaml": (
            "Agent Lightning trains calc at http://127.0.0.1:8000"
        ),
    },
    "cli.md": {
        "agl dashboard runs/calc-20250101-120000": "Dashboard: http://127.0.0.1:",
        "agl serve runs/calc-20250101-120000": "Try it:",
        "agl store --path store.db --host 0.0.0.0": "Serving the store store.db",
        "agl gateway --upstream gpt=https://api.example.com/v1 --path calls.db": "Calls are recorded in calls.db",
    },
    "fine-tuning-api.md": {
        "agl serve calc --training served": "with fine-tuning of calc",
        "agl serve calc --training served --agent sums=my_agent.py:agent": "with fine-tuning of calc",
    },
    "store.md": {
        "agl store --path store.db --host 0.0.0.0": "Serving the store store.db",
    },
    "tinker.md": {
        "agl serve calc --training served": "Clients of tinker: TINKER_BASE_URL=",
    },
}
"""Commands that serve until Ctrl-C, by page, with words that they print when they do."""

_MAKES_AN_ENVIRONMENT = "makes an environment, which takes minutes; .ci/run makes one from nothing by the same Makefile"
_SENTIMENT = "downloads a model and trains for half an hour; tests/examples/test_sentiment.py has its parts"
_FORKS = "tests/cli/test_fork.py"
_ENVIRONMENTS = "tests/cli/test_environments.py"
_NODE = "tests/e2e/test_docs_as_typed.py"
_GPU = "needs a GPU; its configuration is read by a test in tests/examples"
_PACKAGES = (
    "installs packages, which takes minutes; make test-clients makes environments with the same versions, "
    "which tests/examples/test_requirements.py compares"
)
_SMOLLM2 = "downloads a model; tests/examples/test_sentiment.py has its parts"
_PROVIDER = "asks a provider; tests/clients/test_support.py has one of its own"
_TAU2 = "needs tau2; tests/clients/test_support_training.py"
SEVERAL = {
    "make demo": _MAKES_AN_ENVIRONMENT,
    "pip install '.[torch]'": _MAKES_AN_ENVIRONMENT,
    **{
        f"pip install -r examples/{file}.txt": _PACKAGES
        for file in (
            "math/requirements",
            "math/requirements-framework",
            "rag/requirements",
            "sql/requirements",
            "support/requirements",
            "werewolf/requirements",
        )
    },
    "agl demo bidding": "tests/examples/test_bidding.py",
    "agl demo calc": "tests/e2e/test_training.py",
    "agl demo code": "tests/examples/test_code.py",
    "agl demo math": "tests/clients/test_math.py",
    "agl demo rag": "tests/clients/test_rag_training.py",
    "agl demo sentiment": _SENTIMENT,
    "agl demo sql": "tests/clients/test_sql_training.py",
    "agl demo support": "tests/clients/test_support_training.py",
    "agl demo terminal": "tests/clients/test_terminal_training.py",
    "agl demo werewolf": "tests/clients/test_werewolf_training.py",
    "agl show runs/werewolf-20250101-120000 --log --limit 1": "tests/cli/test_agents.py",
    "agl train --agent examples/math/framework_agent.py:framework_agent --tasks data/math/train.jsonl "
    "--val-tasks data/math/val.jsonl --config examples/math/config.yaml": "tests/clients/test_math.py",
    "agl train --agent examples/support/support_agent.py:support_agent --tasks data/retail/train.jsonl "
    "--val-tasks data/retail/test.jsonl --config examples/support/config.gpu.yaml --backend vllm": _GPU,
    "export SUPPORT_USER_MODEL=openai/gpt-4.1 OPENAI_API_KEY=…": _PROVIDER,
    "npm install --no-package-lock --prefix ~/.cache/agentlightning/codex-0.169.0 @openai/codex@0.169.0": (
        "downloads 400 MB; tests/examples/test_terminal.py compares it with what make test-clients types"
    ),
    "python -m examples.sentiment.tune": _SMOLLM2,
    "python -m examples.support.domains retail data/retail": _TAU2,
}
"""Commands that stand on several pages: the test that types or does the same, or why they are not typed."""
ELSEWHERE = {
    "README.md": {
        "make test": _MAKES_AN_ENVIRONMENT,
        'agl train --agent "node agent.js" --tasks tasks.jsonl --model calc': _NODE,
    },
    "algorithms.md": {
        "agl train --data chats.jsonl --model calc": "tests/cli/test_train_data.py",
        "agl train --algorithm sft --set from_run=runs/sampled --set min_reward=1 --agent calc_agent.py:calc_agent "
        "--tasks tasks.jsonl": "tests/examples/test_good_runs.py",
    },
    "applications.md": {
        **{
            f"agl train --agent examples/{name}/{name}_agent.py:{name}_agent --tasks data/{name}/train.jsonl "
            f"--val-tasks data/{name}/val.jsonl --config examples/{name}/config.gpu.yaml --backend vllm": _GPU
            for name in ("code", "math", "rag", "sentiment", "sql", "terminal")
        },
        "python -m examples.sentiment.reviews data/sentiment": "downloads a package; tests/examples/test_sentiment.py",
        "agl train --agent examples/werewolf/werewolf_agent.py:werewolf_agent --tasks data/werewolf/train.jsonl "
        "--val-tasks data/werewolf/val.jsonl --config examples/werewolf/config.gpu.yaml --backend vllm": _GPU,
    },
    "cli.md": {
        "agl fork runs/calc-20250101-120000 ro-123 --at 2 --times 8 --trust": _FORKS,
        "agl run --agent my_agent.py:agent --tasks tasks.jsonl --endpoint https://api.example.com/v1 "
        "--endpoint-model gpt": "asks a provider; tests/first_day/test_external.py has one of its own",
        'agl train --agent "node agent.js" --tasks tasks.jsonl --model calc --set steps=20 --set group_size=8': (
            "takes minutes; tests/e2e/test_docs_as_typed.py types it without the settings"
        ),
        "agl optimize --agent my_agent.py:agent --tasks train.jsonl --val-tasks val.jsonl --prompt prompt.txt "
        "--endpoint https://api.openai.com/v1 --endpoint-model gpt-5-mini --critic-model gpt-5 --budget-rollouts 500": (
            "asks a provider; tests/cli/test_optimize.py has one of its own"
        ),
        "AGL_STORE_KEY=… agl runner --server http://10.0.0.1:4747 --agent my_agent.py:agent": (
            "names another machine; tests/e2e/test_train_elsewhere.py has both on one"
        ),
        "agl judge runs/grpo-20250101-120000 --labels labels.jsonl --url https://api.openai.com/v1 "
        "--model gpt-4.1-mini": ("asks a provider; tests/cli/test_judge.py has one of its own"),
        "agl judge runs/grpo-20250101-120000 --write-labels labels.jsonl": "tests/cli/test_judge.py",
        "agl export runs/grpo-20250101-120000 --push me/my-model": "needs an account; tests/cli/test_export_model.py",
        "agl plan --model Qwen/Qwen3-8B --gpus 2xH100 --lora-rank 16": "looks at the Hub; tests/cli/test_plan.py",
        "agl gateway --model runs/calc-20250101-120000 --server http://store.example:4747": (
            "names another machine; tests/cli/test_gateway.py has both on one"
        ),
    },
    "fine-tuning-api.md": {
        'curl -H "Authorization: Bearer $AGL_API_KEY" -H "Content-Type: application/json" '
        """-d '{"name": "anna"}' http://127.0.0.1:8000/v1/organization/admin_api_keys""": (
            "tests/finetuning/test_api.py"
        ),
    },
    "forks.md": {
        "agl show runs/my-run --failed": "tests/cli/test_looking.py",
        "agl fork runs/my-run ro-1a218e838997077e215f7 --at 2 --times 8 --trust": _FORKS,
        'agl fork runs/my-run ro-1a218e838997077e215f7 --at 2 --edit "tool=No such file." --times 8 --trust': _FORKS,
        "agl fork runs/my-run ro-1a218e838997077e215f7 --at 0 --edit system=@prompt.txt --trust": _FORKS,
        "agl fork runs/my-run ro-1a218e838997077e215f7 --at 2 --agent my_agent.py:agent --model ./other-model": _FORKS,
    },
    "from-verifiers.md": {
        "agl train --env verifiers:sums --env-option python=./verifiers-env/bin/python --model Qwen/Qwen3-0.6B": (
            _ENVIRONMENTS
        ),
    },
    "from-harbor.md": {
        "agl env check harbor:./tasks": _ENVIRONMENTS,
        "agl train --env harbor:./tasks --agent codex --model ./my-model --concurrency 4": _ENVIRONMENTS,
        "agl eval runs/my-run --trust": "tests/cli/test_evaluate.py",
        "agl export runs/my-run --atif trajectories": "tests/cli/test_export.py",
    },
    "from-openenv.md": {
        "uvicorn my_env:app --port 8000": "tests/environments/test_openenv.py",
        "agl env check openenv:http://127.0.0.1:8000": _ENVIRONMENTS,
        "agl train --env openenv:http://127.0.0.1:8000 --model ./my-model --concurrency 8": _ENVIRONMENTS,
    },
    "environments.md": {
        "agl train --env inspect:my_tasks.py@my_task --env-option python=./inspect-env/bin/python --model ./my-model": (
            _ENVIRONMENTS
        ),
        "agl train --agent my_agent.py:agent --tasks hf:openai/gsm8k:main@train "
        "--val-tasks hf:openai/gsm8k:main@test[:200] --model ./my-model": "tests/trainer/test_hub.py",
        "agl train --env verifiers:my-taskset --env-option python=./verifiers-env/bin/python --model ./my-model": (
            _ENVIRONMENTS
        ),
        "agl train --env openenv:my_env:app --env-option python=./openenv-env/bin/python --model ./my-model "
        "--concurrency 8": "tests/environments/test_openenv.py",
        "agl train --env openenv:http://127.0.0.1:8000 --model ./my-model --concurrency 8": _ENVIRONMENTS,
        "agl export runs/my-run --atif trajectories": "tests/cli/test_export.py",
        "agl train --env gym:FrozenLake-v1 --env-option is_slippery=false --model ./my-model": _ENVIRONMENTS,
        "agl env check harbor:./tasks": _ENVIRONMENTS,
        "agl train --env harbor:./tasks --agent codex --model ./my-model --env-option val=./held-out": _ENVIRONMENTS,
        "agl env check harbor:my-tasks@1.0 --env-option registry_path=./registry.json": _ENVIRONMENTS,
    },
    "examples/calc/README.md": {
        "python -m examples.calc.make_model --out agentlightning/models/calc": (
            "takes minutes; tests/examples/test_calc_model.py has its parts"
        ),
    },
    "examples/code/README.md": {
        "agl train --agent examples/code/code_agent.py:code_agent --tasks my.jsonl "
        "--config examples/code/config.gpu.yaml --backend vllm": _GPU,
    },
    "examples/math/README.md": {
        f"python -m examples.math.train_framework_agent{flag}": "tests/clients/test_lab.py" for flag in ("", " --debug")
    },
    "examples/own_algorithm/README.md": {
        "python examples/own_algorithm/train.py": "tests/examples/test_own_algorithm.py",
    },
    "examples/own_loop/README.md": {"python examples/own_loop/loop.py": "tests/examples/test_own_loop.py"},
    "examples/programs/README.md": {
        'agl train --agent "python agent.py" --tasks tasks.jsonl --set steps=14 --set tasks_per_step=8 '
        "--set minibatches=2 --set learning_rate=5e-4 --set max_context=512": "tests/e2e/test_programs.py",
        'agl train --agent "node agent.js" --tasks tasks.jsonl …': "tests/e2e/test_programs.py",
        'agl train --agent "sh agent.sh" --task-as env --grader "python grade.py" --tasks one_step.jsonl …': (
            "tests/e2e/test_programs.py"
        ),
    },
    "examples/rag/README.md": {
        "agl train --agent examples/rag/rag_agent.py:rag_agent --tasks my.jsonl "
        "--config examples/rag/config.gpu.yaml --backend vllm": _GPU,
    },
    "examples/room_booking/README.md": {
        "python -m examples.room_booking.tune --algorithm apo": "tests/examples/test_room_booking.py",
        "python -m examples.room_booking.tune --url https://api.openai.com/v1 --key $OPENAI_API_KEY "
        "--model gpt-5-mini --critic gpt-5": "asks a provider; tests/examples/test_room_booking.py has one of its own",
    },
    "examples/sentiment/README.md": {"python -m examples.sentiment.smollm2": _SMOLLM2},
    "from-0.3.md": {
        "pip install . && pip install agent-framework-lab agent-framework-core": _MAKES_AN_ENVIRONMENT,
    },
    "examples/sql/README.md": {
        "agl train --agent examples/sql/sql_agent.py:sql_agent --tasks my.jsonl "
        "--config examples/sql/config.gpu.yaml --backend vllm": _GPU,
    },
    "examples/support/README.md": {
        "pip install -r examples/support/requirements-lab.txt": _PACKAGES,
        "export SUPPORT_USER_BASE_URL=http://10.0.0.1:8000/v1": _PROVIDER,
        "export SUPPORT_USER_MODEL=openai/user SUPPORT_USER_BASE_URL=http://gateway.agentlightning/v1 "
        "SUPPORT_USER_API_KEY=none": "tests/clients/test_support.py",
        "agl train --agent examples/support/support_agent.py:support_agent --tasks data/retail/train.jsonl "
        "--config examples/support/config.gpu.yaml --backend vllm "
        "--set 'policies=[\"assistant\"]' --set frozen=user": _GPU,
        **{
            f"agl train --agent examples/support/support_agent.py:support_agent --tasks data/{domain}/train.jsonl "
            f"--val-tasks data/{domain}/test.jsonl --config examples/support/config.gpu.yaml --backend vllm": _GPU
            for domain in ("airline", "telecom")
        },
        "agl train --agent examples/support/lab_agent.py:lab_agent --tasks data/airline/train.jsonl "
        "--val-tasks data/airline/test.jsonl --config examples/support/config.gpu.yaml --backend vllm": _GPU,
        "python -m examples.support.domains airline data/airline": _TAU2,
        "python -m examples.support.domains telecom data/telecom": _TAU2,
        "export AGL_STORE_KEY=a-key-of-yours": "tests/clients/test_support_training.py",
        "agl train --remote --model $(python -m examples.tools.cached support) --tasks data/support/train.jsonl "
        "--val-tasks data/support/val.jsonl --config examples/support/config.yaml": (
            "tests/clients/test_support_training.py"
        ),
        "agl runner --server http://127.0.0.1:4747 --agent examples/support/support_agent.py:support_agent "
        "--concurrency 64": "tests/clients/test_support_training.py",
    },
    "examples/delegation/README.md": {
        "python examples/delegation/train.py": "takes minutes; tests/clients/test_delegation.py does two steps of it"
    },
    "examples/terminal/README.md": {
        "agl train --agent examples/terminal/terminal_agent.py:terminal_agent --tasks my.jsonl "
        "--config examples/terminal/config.gpu.yaml --backend vllm": _GPU,
    },
    "examples/tools/README.md": {
        "python -m examples.tools.make_model sql --out models/sql": (
            "takes minutes; tests/examples/test_tools.py types it with --quick"
        ),
    },
    "examples/two_policies/README.md": {"python examples/two_policies/train.py": "tests/e2e/test_policies.py"},
    "first-curve.md": {
        **dict.fromkeys(
            (
                "python make_mails.py",
                "agl doctor --agent mail_agent.py:agent --tasks train.jsonl",
                "agl train --data chats.jsonl --model calc --name sft --set epochs=24 --set learning_rate=1e-3 "
                "--set tasks_per_step=8",
                "agl train --model runs/sft --agent mail_agent.py:agent --tasks train.jsonl --val-tasks val.jsonl "
                "--name grpo --steps 30 --set tasks_per_step=32",
                "agl runs",
                "agl dashboard runs/grpo",
                "agl eval runs/grpo --trust",
            ),
            "tests/e2e/test_first_curve.py",
        ),
    },
    "getting-started.md": {
        "agl show runs/grpo-20250101-120000": "tests/e2e/test_docs_as_typed.py",
        "agl eval runs/grpo-20250101-120000 --trust": "tests/e2e/test_docs_as_typed.py",
    },
    "kubernetes.md": {
        'agl runner --server http://store:4747 --agent "python /app/agent.py" --isolation kubernetes '
        "--isolation-option image=registry.example/my-agent:1": (
            "names other machines; tests/e2e/test_kubernetes.py has all on one"
        ),
        **dict.fromkeys(
            (
                "docker build -f deploy/Dockerfile -t registry.example/agentlightning:0.3.0 .",
                "kubectl create namespace training",
                "kubectl label namespace training pod-security.kubernetes.io/enforce=restricted",
                "kubectl -n training create secret generic agentlightning --from-literal=store-key=$STORE_KEY "
                "--from-literal=api-key=$API_KEY --from-literal=dsn=$DSN",
                "helm -n training install agl deploy/helm/agentlightning "
                "--set image.repository=registry.example/agentlightning "
                "--set gateway.upstreams.gpt=https://api.example.com/v1 "
                '--set runner.command="python /app/agent.py" --set runner.image=registry.example/my-agent:1',
            ),
            "needs a cluster; tests/deploy renders the chart",
        ),
    },
    "programs.md": {
        'agl train --agent codex --tasks tasks.jsonl --grader "python grade.py" --model ./my-model': (
            "needs Codex; tests/litagent/test_known_agents.py starts each agent's command"
        ),
        'agl train --agent "node agent.js" --tasks tasks.jsonl --model calc --set steps=20': (
            "takes minutes; tests/e2e/test_docs_as_typed.py types it without the setting"
        ),
    },
    "ray.md": {
        "agl train --agent my_agent.py:agent --tasks tasks.jsonl --model Qwen/Qwen3-4B --backend ray --address auto "
        "--set ranks=4 --n-runners 8": "needs a cluster; tests/backend/ray has one of its own",
        "ray job submit --address http://head:8265 --working-dir . -- agl train --agent my_agent.py:agent "
        "--tasks tasks.jsonl --model Qwen/Qwen3-4B --backend ray --address auto --set ranks=4 --n-runners 8": (
            "needs a cluster; tests/backend/ray/test_deploy.py compares its flags"
        ),
    },
    "runners.md": {
        f"AGL_CURRENT_ROLE={role} AGL_SERVER_HOST=10.0.0.1 AGL_STORE_KEY=$KEY python train.py": (
            "names another machine; tests/runner/test_roles.py has both on one"
        )
        for role in ("algorithm", "runner   ")
    },
    "vllm.md": {
        'agl train --agent "node agent.js" --tasks tasks.jsonl --model Qwen/Qwen3-0.6B --backend vllm '
        "--backend-option replicas=2": "needs vLLM; make test-vllm has a small model",
        "agl serve runs/my-run --backend vllm": "needs vLLM; make test-vllm has a small model",
        "PYTHONPATH=WORKER VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL "
        "--enable-scale-out --logprobs-mode processed_logprobs --max-logprobs 101 --generation-config vllm "
        """--structured-outputs-config '{"backend": "guidance"}' """
        "--worker-extension-cls agl_vllm_worker.Publication": "needs vLLM; make test-vllm starts it with these options",
    },
}
"""The others by page, likewise: the test that types or does the same, or why they are not typed."""
OTHER_BLOCKS = {
    ("bring-your-own.md", "javascript"): "tests/e2e/test_pages.py",
    ("fine-tuning-api.md", "toml"): "tests/finetuning/test_page.py",
    ("tinker.md", "toml"): "tests/finetuning/test_page.py",
    ("fine-tuning-api.md", "json"): "tests/finetuning/graders/test_page.py",
}
"""Blocks that are neither Python, nor for a shell, nor what something prints (`text`): the test that runs them."""


def name_of(page: Path) -> str:
    """Of a page in the tables: its path below docs/, or that of an example's README below the root."""
    below = ROOT / "docs" if page.is_relative_to(ROOT / "docs") else ROOT
    return page.relative_to(below).as_posix()


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each block; a command that is set in stands for a block of its own."""
    text = page.read_text()
    fenced = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
    for found in fenced.finditer(text):
        yield found[2], found[3]
    rest = CONTINUED.sub(" ", fenced.sub("", text))
    for line in re.findall(r"^ {4,}((?:agl|export|make|npm|pip|python) \S.*)$", rest, flags=re.MULTILINE):
        yield "sh", line


def commands(page: Path) -> list[str]:
    """What is typed, line by line, without prompts and comments; continued lines as one."""
    typed: list[str] = []
    for language, text in blocks(page):
        if language in SHELL:
            lines = CONTINUED.sub(" ", text).splitlines()
            prompts = any(PROMPT.match(line) for line in lines)
            behind = [PROMPT.sub("", line) for line in lines if PROMPT.match(line) or (language and not prompts)]
            typed += [re.sub(r"\s+# .*$", "", line).strip() for line in behind if line.strip()]
    return typed
