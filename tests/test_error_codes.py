"""Each error has a code of its own, which programs read: from the exception, from `--json`, from a store's server."""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path

import pytest

from agentlightning import cli, errors
from agentlightning.store.http.api import STATUS_OF
from agentlightning.store.http.problems import TITLES, describe

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.AgentLightningError) and kind.__module__ == errors.__name__
]
DOCUMENTED = Path(__file__).parents[1] / "docs" / "troubleshooting.md"


def test_no_two_share_a_code_and_each_is_documented() -> None:
    codes = {kind.__name__: vars(kind)["code"] for kind in KINDS}
    assert len(set(codes.values())) == len(codes)
    assert dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", DOCUMENTED.read_text(), re.MULTILINE)) == codes


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["runs", "nowhere", "--json"], "config"),
        (["store", "stats", "nowhere.db", "--json"], "config"),
        (["plan", "--model", "no/such/model", "--json"], "model"),
        (["runs", "nowhere"], None),
        (["runs", "--", "--json"], None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_command_that_fails_says_so_to_programs(
    arguments: list[str],
    code: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["agl", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    assert ended.value.code == 1
    if code is None:
        assert not printed.out
    else:
        error = json.loads(printed.out)["error"]
        assert error["code"] == code
        assert error["message"] in printed.err, "people read the same"


@pytest.mark.parametrize("status", [*TITLES, 401, 403, 418])
def test_a_problem_has_a_code(status: int) -> None:
    assert re.fullmatch(r"[a-z_]+", describe(status, "Why.").code)


@pytest.mark.parametrize("kind", [kind for kind in STATUS_OF if issubclass(kind, errors.AgentLightningError)])
def test_a_problem_has_the_code_of_its_error(kind: type[errors.AgentLightningError]) -> None:
    assert describe(STATUS_OF[kind], "Why.", kind.code).code == kind.code
