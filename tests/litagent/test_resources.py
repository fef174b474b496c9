"""The resources as agents are given them."""

from __future__ import annotations

import pytest

from agentlightning.errors import AgentError
from agentlightning.litagent.litagent import GivenResources
from agentlightning.types import LLM, PromptTemplate

ENDPOINT = LLM(endpoint="http://localhost/v1", model="m")


@pytest.mark.parametrize(("there", "other"), [("llm", "main_llm"), ("main_llm", "llm")])
def test_both_names_of_the_endpoint_work(there: str, other: str) -> None:
    given = GivenResources({there: ENDPOINT})
    assert given[other] is ENDPOINT
    assert given.get(other) is given.get(there) is ENDPOINT
    assert other in given
    assert list(given) == [there], "it is one resource"


def test_two_endpoints_keep_their_names() -> None:
    other = ENDPOINT.model_copy(update={"model": "n"})
    given = GivenResources({"llm": ENDPOINT, "main_llm": other})
    assert (given["llm"], given["main_llm"]) == (ENDPOINT, other)


def test_a_missing_name_says_which_there_are() -> None:
    given = GivenResources({"llm": ENDPOINT, "prompt": PromptTemplate(template="?")})
    for error in (KeyError, AgentError):
        with pytest.raises(error) as raised:
            given["judge"]
        assert str(raised.value).startswith("There is no resource 'judge'; there are: 'llm', 'prompt'.")
    assert given.get("judge") is None
    assert "judge" not in given


def test_another_model_behind_the_same_endpoint() -> None:
    judge = ENDPOINT.model_copy(update={"sampling_parameters": {"temperature": 1.0}}).for_model("judge")
    assert (judge.endpoint, judge.model, judge.sampling_parameters) == (ENDPOINT.endpoint, "judge", {})
