"""The documentation tells of the code as it is: settings with their defaults and values, names, commands, extras, files
and what is computed on paper.
"""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import agentlightning as agl
from agentlightning.algorithm.records import names_of
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.cli.app import app
from agentlightning.environments.base import SCHEMES
from scripts.settings import written
from tests.source.commands import PAGES, name_of

ROOT = Path(__file__).parents[2]
NEEDS = {
    "advantage": {"reward_weights": {"correct": 1.0}},
    "frozen": {"policies": ["solver"]},
}
"""What a setting that a page names is refused without."""
NO_SETTINGS = ("max_tokens=0", 'checkpoint_copy="s3://bucket/run"')
"""In a request, and with a package that tests have not."""


def settings_table(heading: str) -> dict[str, str]:
    """The settings in the table under a heading of configuration.md, with their defaults as written."""
    text = (ROOT / "docs" / "configuration.md").read_text()
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|(.*?)\|", section, flags=re.MULTILINE)
    return {name: default.strip() for name, default in rows}


def documented(default: object) -> str:
    return f"`{default!r}`"


def test_grpo_settings() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert written(page) == page, "run `python scripts/settings.py --write`"


def test_a_setting_without_a_row_is_named() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    with pytest.raises(ValueError, match="no row of kl_coef"):
        written(page.replace("| `kl_coef` or", "| kl_coef or"))


def test_rollout_config_settings() -> None:
    wanted = {
        name: documented(f.get_default(call_default_factory=True)) for name, f in agl.RolloutConfig.model_fields.items()
    }
    assert settings_table("RolloutConfig") == wanted


def test_trainer_settings() -> None:
    parameters = list(inspect.signature(agl.Trainer).parameters.values())
    assert settings_table("Trainer") == {p.name: documented(p.default) for p in parameters}


@pytest.mark.parametrize(("heading", "kind"), [("APO", agl.APO), ("GEPA", agl.GEPA)])
def test_settings_of_prompt_optimisers(heading: str, kind: type[agl.APO] | type[agl.GEPA]) -> None:
    text = (ROOT / "docs" / "prompts.md").read_text()
    table: dict[str, str] = {}
    for part in ("Of both", heading):
        section = text.split(f"\n### {part}\n")[1].split("\n### ")[0]
        table |= dict(re.findall(r"^\| `(\w+)` \| *(.*?) *\|", section, flags=re.MULTILINE))
    wanted = {f.name: "" if f.default is MISSING else documented(f.default) for f in fields(kind)}
    assert table == wanted


def test_every_outcome_is_explained() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert {outcome for outcome in agl.Outcome if f"| `{outcome.value}` |" not in text} == set()


def test_every_command_and_option_is_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    commands = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    assert set(re.findall(r"^## agl (\S+)$", text, flags=re.MULTILINE)) == set(commands)
    for name, command in commands.items():
        section = text.split(f"\n## agl {name}\n")[1].split("\n## ")[0]
        options = {p.opts[0] for p in command.params if p.opts[0].startswith("--")}
        assert set(re.findall(r"^\| `(--[\w-]+)` \|", section, flags=re.MULTILINE)) == options


def in_words(text: str) -> str:
    """Its words, without the marks of Markdown."""
    return re.sub(r"\W+", " ", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)).strip().lower()


def test_an_option_is_explained_in_the_words_of_its_help() -> None:
    """The page may say more behind them."""
    text = (ROOT / "docs" / "cli.md").read_text()
    other = []
    for name, command in typer.main.get_command(app).commands.items():  # pyright: ignore[reportAttributeAccessIssue]
        section = text.split(f"\n## agl {name}\n")[1].split("\n## ")[0]
        rows = dict(re.findall(r"^\| `(--[\w-]+)` \| (.*?) \|$", section, flags=re.MULTILINE))
        other += [
            f"agl {name} {p.opts[0]}: {p.help}"
            for p in command.params
            if p.opts[0].startswith("--") and not in_words(rows[p.opts[0]]).startswith(in_words(p.help or ""))
        ]
    assert other == []


def test_every_benchmark_is_documented() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    scripts = {path.name: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    assert {name for name in scripts if f"`benchmarks/{name}`" not in text} == set()
    without = {name for name, code in scripts.items() if not {"--quick", "--json"} <= {*re.findall(r"--\w+", code)}}
    assert without == set(), "the page says that all of them take both, and `make bench` gives --quick"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_examples_are_python(page: Path) -> None:
    for block in code_blocks(page):
        compile(block.replace("…", "..."), str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_in_examples_exist(page: Path) -> None:
    used = set(re.findall(r"\bagl\.([A-Za-z_]\w*)", page.read_text()))
    older = {name for name in used if hasattr(agl, name)} if page.name == "from-0.3.md" else set()
    assert {name for name in used if name not in agl.__all__} <= older


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_imports_in_examples_exist(page: Path) -> None:
    """Also of blocks that no test runs."""
    trees = [ast.walk(ast.parse(block.replace("…", "..."))) for block in code_blocks(page)]
    imports = [n for tree in trees for n in tree if isinstance(n, ast.ImportFrom)]
    ours = [n for n in imports if re.match(r"agent_?lightning\b", n.module or "")]
    named = [(n.module or "", alias.name) for n in ours for alias in n.names]
    assert [f"{module}.{name}" for module, name in named if not hasattr(import_module(module), name)] == []


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_arguments_in_examples_exist(page: Path) -> None:
    """Of every `agl.name(argument=…)` in a block, by the signature of what is called."""
    unknown = []
    for block in code_blocks(page):
        for call in (n for n in ast.walk(ast.parse(block.replace("…", "..."))) if isinstance(n, ast.Call)):
            if not isinstance(call.func, ast.Attribute) or ast.unparse(call.func.value) != "agl":
                continue
            called = getattr(agl, call.func.attr)
            parameters = inspect.signature(called).parameters
            if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                continue
            if isinstance(called, type) and issubclass(called, TrainingSettings):
                parameters = names_of(called)
            unknown += [f"{call.func.attr}({k.arg}=…)" for k in call.keywords if k.arg and k.arg not in parameters]
    assert unknown == []


def typed_commands(page: Path) -> list[str]:
    """Every `agl …` of a page: in blocks, line by line with continued lines as one, and in running text."""
    text = re.sub(r"\$\(.*?\)", "…", page.read_text().replace("\\\n", " "))
    blocks = re.findall(r"^ *(?:```\w*\n.*?```|    agl .*?$)", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("agl ")] + re.findall(r"`(agl \S[^`\n]*)`", text)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_the_text_exist(page: Path) -> None:
    """Each command and each of its options, as they are typed."""
    commands = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    wrong = []
    for line in typed_commands(page):
        name, *words = line.removeprefix("agl ").split(" # ")[0].split()
        if name.startswith("-") or name.isupper():  # of all commands
            continue
        if name not in commands:
            wrong.append(line)
            continue
        command = commands[name]
        group = getattr(command, "commands", {})
        known = {opt for c in (command, *group.values()) for p in c.params for opt in (*p.opts, *p.secondary_opts)}
        given = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        wrong += [f"{line}: {option}" for option in given - known - {"--help", "-h"}]
    assert wrong == []


def settings_in(page: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each `name=value` and `GRPO(name=value)` in running text, as it stands, with the algorithm and the values."""
    names = {*names_of(agl.GRPO)}
    text = re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text())
    for written_so, kind, arguments in re.findall(r"`((?:(\w+)\()?(\w+=[^=`\n][^`\n]*?)(?(2)\)))`", text):
        if "…" in written_so or not issubclass(getattr(agl, kind or "GRPO", int), TrainingSettings):
            continue
        try:
            call = ast.parse(f"f({arguments})", mode="eval").body
            given = {k.arg: eval(ast.unparse(k.value), {"agl": agl}) for k in call.keywords}  # pyright: ignore
        except (NameError, SyntaxError):  # a value in words, or another thing
            continue
        if given and given.keys() <= names:
            yield written_so, kind, given


def test_settings_in_the_text_are_taken() -> None:
    """By the algorithm that is named, or by one of the family."""
    refused = []
    every = ((page, *found) for page in PAGES for found in settings_in(page))
    for page, text, kind, given in every:
        needed = {key: value for name in given for key, value in NEEDS.get(name, {}).items()}
        reasons = []
        for name in [kind] if kind else ["GRPO", "SFT", "DPO", "Distill", "SelfDistill", "PPO"]:
            try:
                getattr(agl, name)(**{"model": "calc", **needed, **given})
                break
            except agl.ConfigError as error:
                if "has no effect here: it needs" in str(error):  # the sentence names the others
                    break
                reasons.append(str(error))
        else:
            refused += [f"{name_of(page)}, {text}: {reasons[0]}"] if text not in NO_SETTINGS else []
    assert refused == []


def test_what_is_installed_is_this_package() -> None:
    """By the folder of the clone, in quotes: the name on the index is another project's, and shells read brackets."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = [text for page in PAGES for text in re.findall(r"pip install ([^`\n]*)", page.read_text())]
    assert [text for text in installed if re.search(r"agentlightning\b|(?<!')\.\[", text)] == []
    named = {extra for text in installed for group in re.findall(r"\.\[([^\]]*)\]", text) for extra in group.split(",")}
    assert named <= extras.keys()


@pytest.mark.parametrize(
    ("page", "option", "beginning"),
    [("environments.md", "--env", "`agl train`"), ("security.md", "--trust", "`agl train --config FILE`")],
)
def test_a_list_of_the_commands_with_an_option_has_them_all(page: str, option: str, beginning: str) -> None:
    (found,) = re.findall(
        rf"{re.escape(beginning)}.*?\b(?:have it|print)\b", (ROOT / "docs" / page).read_text(), re.DOTALL
    )
    commands = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    named = {text.removeprefix("agl ").split()[0] for text in re.findall(r"`([^`]*)`", found)}
    assert named == {name for name, command in commands.items() if any(option in p.opts for p in command.params)}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_options_of_an_environment_are_listed(scheme: str) -> None:
    """But for what its name and `--agent` give, and what goes to Gymnasium as it is."""
    module, kind = SCHEMES[scheme].split(":")
    _, *taken = inspect.signature(getattr(import_module(module), kind)).parameters
    text = (ROOT / "docs" / "environments.md").read_text()
    (section,) = re.findall(rf"^## {scheme}.*?(?=^## )", text, flags=re.MULTILINE | re.DOTALL | re.IGNORECASE)
    (listed,) = re.findall(r"^Options:.*?\n\n", section, flags=re.MULTILINE | re.DOTALL)
    assert {name for name in taken if f"`{name}" not in listed} <= {"agent", "arguments"}


@pytest.mark.parametrize("page", [page for page in PAGES if "`agl plan --model 1.7B" in page.read_text()], ids=name_of)
def test_what_a_page_says_of_a_plan_is_what_it_prints(page: Path) -> None:
    told = r"`agl (plan [^`]*)` estimates (.*? GiB) of GPU memory with vLLM and `(.*?)`, .*? in (about \d+ s)\."
    ((command, memory, setting, seconds),) = re.findall(told, page.read_text())
    printed = CliRunner().invoke(app, command.split(), env={"COLUMNS": "200"}).output
    assert f"{setting}: {memory} with backend='vllm', a step {seconds}" in printed


def test_files_in_the_text_exist() -> None:
    """Scripts, tests and the like, with the options that they are given."""
    folders = "agentlightning/[a-z]|benchmarks/|deploy/|examples/|scripts/|tests/(?=[a-z])"
    missing = []
    for page in PAGES:
        for name, rest in re.findall(rf"(?<![\w./~-])((?:{folders})[\w./-]*\w)([^`\n]*)", page.read_text()):
            file = ROOT / name
            missing += [] if file.exists() else [f"{name_of(page)}: {name}"]
            if name.startswith(("benchmarks/", "scripts/")) and file.is_file():
                options = re.findall(r"(?<![\w-])--[a-z][\w-]*", rest)
                missing += [f"{name_of(page)}: {name} {o}" for o in options if f'"{o}"' not in file.read_text()]
    assert missing == []


def test_scripts_of_the_examples_that_people_type_answer_to_help() -> None:
    """They read their arguments by argparse; one took `--help` for the name of a folder, and filled it."""
    read = {path for path in (ROOT / "examples").rglob("*.py") if "sys.argv[" in path.read_text()}
    started = {"code/inside/alone.py", "rag/server.py", "terminal/inside/start.py"}  # by other programs
    assert {path.relative_to(ROOT / "examples").as_posix() for path in read} == started
