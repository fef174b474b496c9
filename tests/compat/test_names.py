"""Every name that scripts for 0.2 and 0.3 import is there, or its error says why it is not and what to do instead."""

# Old paths exist while the program runs, not for the checker.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import copy
import importlib
import json
import logging
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import agentlightning as agl
from agentlightning.compat.lookup import NotKept, resolve
from agentlightning.compat.row import Old
from agentlightning.compat.table import ARGUMENTS, BY_NAME, MEMBERS, MODULES, NAMES, TABLE

TEXT = (Path(__file__).parent / "names_0_3.txt").read_text().partition("\n")[2]
PUBLIC = {module: names.split() for module, names in re.findall(r"(?m)^(\S+):((?: \S+|\n {4}\S+)+)", TEXT)}


@pytest.mark.parametrize("module", PUBLIC)
def test_each_public_name_is_there_or_says_why_it_is_not(module: str) -> None:
    """Nothing that 0.3.0 had is missing without a line in the table; what is not kept is not there to be found."""
    assert PUBLIC[module]
    for name in PUBLIC[module]:
        scope: dict[str, object] = {}
        old = BY_NAME.get(f"{module}:{name}") or _of_module(module)
        if old is None or old.to is not None:
            exec(f"from {module} import {name}", scope)
            assert scope[name] is not None, name
            continue
        assert len(old.note) > 30, f"{name}: says what to do instead"
        with pytest.raises(NotKept, match=re.escape(old.note)):
            exec(f"from {module} import {name}", scope)
        if hasattr(sys.modules.get(module), "__path__"):
            assert not hasattr(sys.modules[module], name)


def _of_module(module: str) -> Old | None:
    """The line of a module, or of the one that it was in."""
    while module and module not in BY_NAME:
        module = module.rpartition(".")[0]
    return BY_NAME.get(module)


def test_all_of_the_original_is_looked_at() -> None:
    assert len(PUBLIC["agentlightning"]) > 90
    assert sum(map(len, PUBLIC.values())) > 350


def test_what_is_kept_leads_somewhere_and_what_is_not_says_why() -> None:
    for old in (*MODULES, *NAMES, *MEMBERS):
        if old.to is None:
            assert old.note, old
            continue
        module, _, name = old.to.partition(":")
        assert not name or hasattr(importlib.import_module(module), name), old
    for old in ARGUMENTS:
        assert old.to or old.note, old


def test_the_table_has_each_name_once_and_no_path_that_exists() -> None:
    assert len({old.name for old in TABLE}) == len(TABLE)
    root = Path(agl.__file__).parent
    for old in MODULES:
        place = root.joinpath(*old.name.split(".")[1:])
        assert not place.is_dir(), old
        assert not place.with_suffix(".py").exists(), old


def test_old_paths_are_modules_in_every_way() -> None:
    import agentlightning.store.memory
    import agentlightning.utils.otel as otel

    from agentlightning.types import core

    assert agentlightning.store.memory.InMemoryLightningStore is agl.InMemoryLightningStore
    assert otel.make_tag_attributes(["a"]) == {"agentlightning.tag.0": "a"}
    assert core.Rollout is agl.Rollout
    assert "Rollout" in core.__all__
    assert sys.modules["agentlightning.types.core"] is core
    assert core.__spec__.origin == "<agentlightning.types.core>", "what python -m takes for the program's name"
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec("from agentlightning.types.core import Nothing")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        agl.nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("agentlightning.nowhere")


@pytest.mark.parametrize("module", [old.name for old in MODULES if old.to is not None])
def test_all_names_of_an_old_path_can_be_imported(module: str) -> None:
    scope: dict[str, object] = {}
    exec(f"from {module} import *", scope)
    assert scope.keys() >= set(importlib.import_module(module).__all__)
    assert not [name for name, value in scope.items() if isinstance(value, ModuleType)]


def test_what_was_pickled_by_its_old_name_is_found() -> None:
    task = agl.EnqueueRolloutRequest(input={"question": "?"})
    old = pickle.dumps(task, protocol=0).replace(b"agentlightning.types.rollout", b"agentlightning.types.core")
    assert b"agentlightning.types.core" in old
    assert pickle.loads(old) == task
    assert pickle.loads(pickle.dumps(agl.LLMProxy)) is agl.LLMProxy


def test_unset_is_one_thing() -> None:
    from agentlightning.store.base import UNSET

    assert pickle.loads(pickle.dumps(UNSET)) is copy.deepcopy([UNSET])[0] is copy.copy(UNSET) is UNSET


async def test_stores_of_other_processes_are_reached_through_what_is_pickled() -> None:
    store = agl.InMemoryLightningStore()
    server = agl.LightningStoreServer(store, port=0, admin_key="key")
    await server.start()
    client = agl.LightningStoreClient(server.endpoint, "key", retry_seconds=1)
    rollout = await client.enqueue_rollout("task")
    for sent in (client, server):
        got = pickle.loads(pickle.dumps(sent))
        assert type(got) is agl.LightningStoreClient
        (found,) = await got.query_rollouts()
        assert found == rollout
        await got.close()
    await client.close()
    await server.stop()
    await store.close()


def test_one_module_can_be_logged() -> None:
    logger = agl.setup_module_logging("DEBUG", name="somebodys.module")
    assert (logger.name, logger.level) == ("somebodys.module", logging.DEBUG)
    agl.setup_logging("WARNING", apply_to=["somebodys.module"], console=False)
    assert (logger.level, logger.handlers) == (logging.WARNING, [])
    setup_module = importlib.import_module("agentlightning.logging").setup_module
    assert setup_module("ERROR", console=False) is logging.getLogger("agentlightning")
    agl.setup_logging(console=False, propagate=True)
    logging.getLogger("agentlightning").setLevel(logging.NOTSET)


def test_reward_is_a_module_and_a_function() -> None:
    import agentlightning.reward
    from agentlightning.reward import reward

    assert reward(lambda: None)() is None
    assert agentlightning.reward(lambda: None)() is None
    assert agentlightning.reward.emit_reward is agl.emit_reward


def test_a_name_that_is_not_kept_is_an_error_of_ours_that_says_what_to_do() -> None:
    with pytest.raises(agl.ConfigError, match=r"PostgresLightningStore"):
        resolve("agentlightning.store", "MongoLightningStore")


NOTICE = """
import agentlightning as agl
for _ in range(3):
    from agentlightning.types.core import Rollout
    agl.TraceStatus, agl.setup_logging
agl.InMemoryLightningStore(thread_safe=True)
print("done")
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=100, check=False)


def test_a_script_gets_one_notice_with_the_newer_names() -> None:
    done = python("-c", NOTICE)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines[0].startswith("This script uses names of agentlightning 0.2/0.3.")
    assert [line.split("→")[1].strip() for line in lines[1:] if "Rollout" in line] == ["agentlightning.Rollout"]
    assert len([line for line in lines if "TraceStatus" in line]) == 1
    assert len([line for line in lines if "thread_safe=" in line]) == 1
    assert not [line for line in lines if "setup_logging" in line], "it has no newer name"


@pytest.mark.slow
def test_a_script_that_uses_no_old_name_loads_nothing_but_the_table() -> None:
    script = (
        "import agentlightning as agl, sys, json; agl.Trainer, agl.emit_reward, agl.InMemoryLightningStore;"
        "print(json.dumps([m for m in sys.modules if m.startswith('agentlightning.compat')]))"
    )
    done = python("-W", "error", "-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    parts = ("", ".finder", ".lookup", ".notice", ".older_arguments", ".row", ".table")
    assert sorted(json.loads(done.stdout)) == [f"agentlightning.compat{part}" for part in parts]


def test_the_names_of_the_table_come_with_their_module() -> None:
    for name in ("agentlightning.trainer.trainer", "agentlightning.tracer.base"):
        source = importlib.import_module(name).__spec__
        assert source is not None
        assert source.origin is not None
        assert Path(source.origin).is_file(), "tools find the file as ever"
