"""Verdicts on the rollouts of a step or of a run: one text and one advice, for run and doctor alike. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from agentlightning.algorithm.episode import Episode
from agentlightning.errors import kind_of
from agentlightning.types import Call, Outcome
from agentlightning.types.finding import Finding, counted, problem, share, warning
from agentlightning.types.names import NO_SUCH_PATH

EXAMPLES = 3
"""So many reasons, or rollouts, are named in the evidence of a finding."""
SHOWN_PARTS = 8
"""So many of the parts of rewards that there are are named; agents name them."""

TOO_LONG = ("did not fit the context", "prompt is too long", "maximum context length")
"""Words of refusals for want of context."""
SHORTER_PROMPTS = (
    "Raise max_context if the model can do more; else shorten system prompt, tools or history, or set "
    "cut_long_prompts=True. If prompts grow from one rollout to the next, the agent keeps its history: begin each "
    "rollout with an empty one."
)
_A_CACHE = (
    "It probably keeps answers from one rollout to the next (functools.cache, a dictionary, a cache of its client). "
    "Turn that off."
)
_KEEPS_ANSWERS = (
    "Every rollout must ask the model itself, because its own answer is what is learned from. If the "
    "run was resumed, look whether this is the agent that it began with."
)
_FRAME = re.compile(r'  File "(.+)", line (\d+), in .*')
_MOST_OF_A_LINE = 300
_MOST_OF_A_HINT = 400
_MOST_OF_CODE = 100
_BUSY = re.compile(r"\b429\b|rate.?limit|too many requests", re.IGNORECASE)
BUSY_FIX = (
    "A provider turns requests away because there are too many of them: lower concurrency (or the provider's "
    "max_concurrency), or ask it for a higher limit."
)
_PROVIDER_FIX = "Check that provider: its base URL, its key, the model's name, and that it runs."
_FIX_OF = {
    Outcome.AGENT_ERROR: "Mend what the message names; agl show --failed shows whole rollouts.",
    Outcome.TIMEOUT: "See where it waits (agl show --failed), or set rollout_config=RolloutConfig(timeout_seconds=…).",
    Outcome.INFRA_ERROR: "This is not the agent's failure: look at the log of the run, the store and the model.",
    Outcome.JUDGE_ERROR: "Mend the grader or the judge: a failure of it is never taken for a reward of 0.",
    Outcome.CANCELLED: "They were cancelled from outside; nothing to mend in the agent.",
}
_WAY_TO_THE_MODEL = (
    "Make its client use the endpoint it is given:  OpenAI(base_url=llm.endpoint, api_key=llm.api_key)  and  "
    "model=llm.model.  A program finds them in its environment: OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL (and "
    "the same of ANTHROPIC_ and GEMINI_). A call counts only if the agent waits for it: await an async client's, read "
    "a stream to its end, and join threads that make some. An agent that catches its own exceptions hides why it did "
    "not call: let them through."
)

_WRONG_PATH = (
    "llm.endpoint is the base URL, and ends in /v1: give it to a client as it is, which adds /chat/completions itself. "
    "Code that posts by itself posts to llm.endpoint + '/chat/completions'. docs/clients.md says what clients need."
)
_OTHER_PARTS = re.compile(
    rf"{NO_SUCH_PATH}\S*/(assistants|audio|batches|containers|conversations|evals|files|images|moderations|realtime|"
    r"threads|uploads|vector_stores|videos)\b"
)
"""Parts of a provider's API that no model answers."""
_NO_MODEL_CALL = (
    "The base URL is right, and the address of a model alone: what a provider keeps or makes besides, such as "
    "conversations, files and images, is not here. Keep a conversation in the agent (its messages, a session in "
    "memory), or give this client the provider's own address and key."
)
_OF_AZURE = f"{NO_SUCH_PATH}/openai/deployments/"
_NO_AZURE = (
    "Azure's clients write Azure's paths. In a training take the plain one of the same package, such as AsyncOpenAI in "
    "place of AsyncAzureOpenAI, or ChatOpenAI of AzureChatOpenAI: OpenAI(base_url=llm.endpoint, api_key=llm.api_key)."
)
_REFUSED_BY_ITS_WORDS = (
    "The base URL is right: the calls arrive. Mend what the message names, in the settings of the program or of "
    "its client; docs/clients.md says which programs need one."
)


def never_called(
    episodes: Sequence[Episode], refused_requests: Mapping[str, int], caches: Sequence[str] = ()
) -> Finding:
    """Why no call of these rollouts was answered: none arrived, or why those that did were refused.

    refused_requests: requests to the gateway that belonged to no attempt, by why they were refused.
    caches: what is to be said of frameworks' caches that are on.
    """
    refusals = Counter(text for e in episodes for text in e.refused)
    refused = Counter(refused_requests) + refusals
    if not refused:
        words = "The agent never called the model: no call arrived at the gateway."
        return problem("never_called", words, " ".join([*caches, _WAY_TO_THE_MODEL]), refused_requests={})
    reason, count = refused.most_common(1)[0]
    words = (
        f"No model call of the agent was answered: {refused.total()} arrived at the gateway, and all of them were "
        f"refused. Most common ({count}×): {reason}"
    )
    refusals.update({text: n for text, n in refused_requests.items() if text.startswith(NO_SUCH_PATH)})
    if not refusals:
        return problem("never_called", words, _WAY_TO_THE_MODEL, refused_requests=dict(refused_requests))
    if any(part in reason for part in TOO_LONG):
        return problem("prompts_too_long", words, SHORTER_PROMPTS, refused=dict(refusals.most_common(EXAMPLES)))
    wrong = _NO_MODEL_CALL if _OTHER_PARTS.match(reason) else _WRONG_PATH
    wrong = _NO_AZURE if reason.startswith(_OF_AZURE) else wrong
    fix = wrong if reason.startswith(NO_SUCH_PATH) else _REFUSED_BY_ITS_WORDS
    return problem("calls_refused", words, fix, refused=dict(refusals.most_common(EXAMPLES)))


def calls_no_longer(caches: Sequence[str]) -> Finding:
    """What is to be said of an agent that called the model in earlier steps."""
    words = "The agent called the model in earlier steps and calls it no longer."
    return problem("answers_kept", words, asks_itself(caches))


def asks_itself(caches: Sequence[str]) -> str:
    """What to do about an agent that earns rewards without asking the model. `caches`: as in `never_called`."""
    return " ".join([*(caches or [_A_CACHE]), _KEEPS_ANSWERS])


def nothing_trained(episodes: Sequence[Episode], selected_by: Mapping[str, str]) -> Finding:
    """What is to be said of calls of which none is trained. `selected_by`: the settings that choose which are."""
    calls = [c for e in episodes for c in e.calls]
    if (nothing := asks_for_nothing(calls)) is not None:
        return nothing
    if not selected_by or not any(len(c.response_ids) for c in calls):
        return problem(
            "nothing_trained",
            f"{counted(len(calls), 'call was', 'calls were')} recorded, without sampled tokens of the policy in "
            "training.",
            "Ask for model=llm.model; look at train_agents and train_prompts, which choose what is trained.",
            policies=sorted({c.info.policy for c in calls}),
        )
    names = {c.info.agent for c in calls}
    seen = [
        *sorted(repr(name) for name in names if name),
        *(["calls without an agent's name"] if None in names else []),
    ]
    chosen_by = " and ".join(f"{name}={pattern!r}" for name, pattern in selected_by.items())
    return problem(
        "nothing_trained",
        f"{chosen_by} chooses none of the calls, so nothing is trained. Seen were: {', '.join(seen)}.",
        "Agents get their names from llm.for_agent(…) or from a framework's spans. What an agent says as "
        "trained_agents is train_agents here.",
        agents=sorted(name for name in names if name),
    )


def asks_for_nothing(calls: Sequence[Call]) -> Finding | None:
    """What is to be said of calls if all of them ask for no tokens."""
    if not calls or any(c.info.asked.get("max_tokens") != 0 for c in calls):
        return None
    return problem(
        "nothing_trained",
        f"{counted(len(calls), 'call asks', 'calls ask')} for max_tokens=0, so the model writes nothing, and "
        "nothing can be learned.",
        "Leave max_tokens out of the agent's request, or give the most tokens that an answer may have.",
    )


def unmatched_agents(episodes: Sequence[Episode], policies: Collection[str]) -> Finding | None:
    """Whether all rewards name agents who made no call, so that they reach nobody. `policies`: the aliases of several
    policies, which rewards may name as well."""
    rewarded = {r.agent for e in episodes for r in e.rewards} - {None}
    calling = {c.info.agent for e in episodes for c in e.calls} - {None}
    if not rewarded or rewarded & {*calling, *policies}:
        return None
    return problem(
        "rewards_reach_nobody",
        f"Rewards are for the agents {sorted(rewarded, key=str)}, and the calls were made by "
        f"{sorted(calling, key=str) or 'agents without a name'}, so no call earns anything.",
        "Give agents their names, as llm.for_agent('writer') does, or leave agent= out of emit_reward.",
        rewarded=sorted(rewarded, key=str),
        calling=sorted(calling, key=str),
    )


def most_fail(failed: Sequence[Episode], of: int) -> Finding:
    """How many of so many rollouts failed, and what most of them said."""
    common = Counter((e.outcome, kind_of(first_line(e))) for e in failed)
    (outcome, kind), count = common.most_common(1)[0]
    same = [e for e in failed if (e.outcome, kind_of(first_line(e))) == (outcome, kind)]
    text, error = first_line(same[-1]), (same[-1].attempt and same[-1].attempt.error) or ""
    return (problem if 2 * len(failed) >= of else warning)(
        "rollouts_fail",
        f"{share(len(failed), of)} rollouts failed. Most common ({count}×): {outcome.value}: {with_cause(error, text)}",
        BUSY_FIX if is_busy(text) else _PROVIDER_FIX if "The provider of '" in error else _FIX_OF.get(outcome, ""),
        outcomes=dict(Counter(e.outcome.value for e in failed).most_common()),
        error="" if _below_the_first_line(error) else _end_of_error(error),
        rollouts=[e.rollout.rollout_id for e in failed if e.outcome is outcome][-EXAMPLES:],
    )


def first_line(episode: Episode) -> str:
    """The first line of the error of a rollout's attempt, cut between words after 300 characters."""
    text = (episode.attempt and episode.attempt.error) or "no message"
    line = text.strip().splitlines()[0]
    return line if len(line) <= _MOST_OF_A_LINE else f"{line[:_MOST_OF_A_LINE].rpartition(' ')[0]} …"


def _ended(text: str) -> str:
    return text if not text or text.endswith((".", "!", "?", "…", ":")) else f"{text}."


def with_cause(error: str, first: str) -> str:
    """The `first` line of an attempt's error; of an exception also what it probably comes from, and the agent's own
    line."""
    return " ".join(filter(None, (_ended(first), *_below_the_first_line(error))))


def _below_the_first_line(error: str) -> tuple[str, ...]:
    """Nothing of errors that are no exceptions, such as a program's."""
    lines = [line for line in error.strip().splitlines()[1:] if line != "Traceback (most recent call last):"]
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    if not frames:
        return ()
    first, last = frames[0], frames[-1]
    place = _FRAME.sub(r"Line \2 of \1", lines[last])
    code = f": `{lines[last + 1].strip()[:_MOST_OF_CODE]}`" if last + 1 < len(lines) else ""
    return _ended(" ".join(lines[:first])[:_MOST_OF_A_HINT]), f"{place}{code}."


def _end_of_error(error: str) -> str:
    """The end of a message, where a program says what happened."""
    return "\n".join(error.strip().splitlines()[-6:])


def is_busy(text: str) -> bool:
    """Whether a message says that a provider was asked too often."""
    return bool(_BUSY.search(text))


def absent_part(name: str, whose: str, known: Collection[str]) -> str:
    """The words where no rollout's reward has the part `name`, and a setting needs it: `whose` says which, " of
    watched_parts" or ", which has a constraint". `known` are the parts that rewards have."""
    has = f"They have: {', '.join(sorted(known)[:SHOWN_PARTS])}." if known else "They have no named parts."
    return (
        f"No rollout's reward has the part '{name}'{whose}. {has} An agent names parts: "
        f"agl.emit_reward({{'right': 1.0, '{name}': 0.5}}, primary_key='right')."
    )
