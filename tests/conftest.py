"""Fixtures that several test folders share."""

from __future__ import annotations

import functools
import gc
import os
import sqlite3
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from agentlightning.compat import notice
from tests import warm_model
from tests.temporary import SHARED, shared_folder

WARM_MODEL = pytest.StashKey[str]()
WITH_REAL_MODEL_PROCESS = {"own_model_process", "slow", "clients", "ray", "vllm", "verl", "kubernetes", "gpu"}
"""Tests with one of these marks start the model process as users do, others fork it (see tests/warm_model.py)."""
settings.register_profile("no clock", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("no clock")
notice.logger.disabled = True  # older names are used here on purpose, and nobody reads what is said at the end


os.environ["XDG_STATE_HOME"] = shared_folder("agl-state-")  # the keys of servers that tests start


def share_certificates() -> None:
    """Clients of these tests speak plain HTTP, and each would read the certificates of a machine: 25 ms every time."""
    make, shared = ssl.create_default_context, functools.cache(ssl.create_default_context)

    def context(purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH, **trusted: Any) -> ssl.SSLContext:
        return (shared if purpose is ssl.Purpose.SERVER_AUTH else make)(purpose, **trusted)

    ssl.create_default_context = context
    with suppress(ImportError):  # not in every environment of other people's agents
        import httpcore2

        httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)


share_certificates()


class ConnectionWithoutSync(sqlite3.Connection):
    """Waits for no disk, as no machine loses its power during a test: a new store takes 5 ms instead of 70."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        with suppress(sqlite3.Error):  # whoever opens it learns that it is damaged
            super().execute("PRAGMA synchronous=OFF")

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        return super().execute("PRAGMA synchronous=OFF" if sql.startswith("PRAGMA synchronous=") else sql, *parameters)


sqlite3.connect = functools.partial(sqlite3.connect, factory=ConnectionWithoutSync)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", help="run the I-th of N parts of the chosen tests; a file stays whole")


def pytest_configure(config: pytest.Config) -> None:
    first = os.getppid() if hasattr(config, "workerinput") else os.getpid()
    config.stash[WARM_MODEL] = str(Path(tempfile.gettempdir(), f"agl-warm-{first}"))
    warm_model.install()


def pytest_sessionfinish() -> None:
    """Not in `pytest_unconfigure`: a worker of pytest-xdist has ten seconds for that."""
    SHARED.close()


def pytest_collection() -> None:
    """Collecting makes a million objects that stay: the garbage collector does not look at them, then or later."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if any(mark.name in WITH_REAL_MODEL_PROCESS for mark in item.iter_markers()):
        os.environ.pop(warm_model.ADDRESS, None)
    else:
        os.environ[warm_model.ADDRESS] = item.config.stash[WARM_MODEL]
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch sees no GPU of CUDA's")


@pytest.hookimpl(wrapper=True)  # around `-m`, which chooses in between
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        quick = item.get_closest_marker("quick_with")
        if quick is not None and not any(name in item.name for name in quick.args):
            item.add_marker(pytest.mark.slow)
    yield
    _choose_shard(config, items)


def _choose_shard(config: pytest.Config, items: list[pytest.Item]) -> None:
    moving = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if moving:  # several processes would choose different tests, and run none
        raise pytest.UsageError(f"The address of an object stands in the name of a test; give it ids: {moving[0]}")
    shard = config.getoption("--shard")
    if shard is None:
        return
    which, _, count = shard.partition("/")
    if not (which.isdecimal() and count.isdecimal() and 1 <= int(which) <= int(count)):
        raise pytest.UsageError(f"--shard {shard}: write 1/3 for the first of three parts.")
    files = sorted({item.path for item in items})[int(which) - 1 :: int(count)]
    others = [item for item in items if item.path not in files]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item.path in files]


SYSTEM_PACKAGES = {
    "bubblewrap": "bubblewrap",
    "podman": "podman",
    "chromium": "chromium",
    "postgresql": "postgresql",
    "node": "nodejs npm",
}
"""Debian's packages by a word of the reasons for which tests are skipped without them."""


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says which system packages bring skipped tests back."""
    reasons = " ".join(str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])).lower()
    missing = [package for word, package in SYSTEM_PACKAGES.items() if word in reasons]
    if missing:
        terminalreporter.write_line(f"Some tests were skipped; they run after: apt-get install {' '.join(missing)}")


CORPUS = [
    "What is 12 + 34 * 5? Use the calc tool.",
    'Call the tool like this: {"name": "calc", "arguments": {"a": 12, "op": "+", "b": 34}}',
    "The answer is 182. system user assistant tool",
]
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random Qwen3 of two layers and a byte-level tokenizer of about 300 tokens.

    Its weights are large, so that a wrong position or mask changes the log-probs visibly.
    """
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("tiny-model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=291, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED_TOKENS])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.save_pretrained(path)
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    config = Qwen3Config(
        vocab_size=len(wrapped),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
        eos_token_id=end,
        pad_token_id=pad,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [end, pad]
    model.save_pretrained(path)
    return path
