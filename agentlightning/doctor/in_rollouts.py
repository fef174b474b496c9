"""What the rollouts of a run say: how they ended, what they earned, whether they can be learned from. Pure."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.rollout_verdicts import (
    EXAMPLES,
    SHORTER_PROMPTS,
    TOO_LONG,
    asks_for_nothing,
    asks_itself,
    first_line,
    most_fail,
    never_called,
    nothing_trained,
    unmatched_agents,
)
from agentlightning.doctor.evidence import Evidence
from agentlightning.models import KNOWS, examples_first
from agentlightning.types import Outcome
from agentlightning.types.finding import Finding, note, problem, share, warning
from agentlightning.types.names import OTHER_ENDPOINT, REWARDED_LATER

MANY, MOST = 0.2, 0.5
"""Shares of rollouts from which on something is worth a word, or stands in the way of training."""
MANY_CALLS = 5
"""From so many calls in a rollout that is too long on, the agent's own loop is the likelier cause."""
SELECTING = ("train_agents", "train_prompts")
"""Settings that choose which calls are trained."""

_NO_REWARD = ("emitted no reward", "posted no reward")
_LONGEST = re.compile(r"maximum context length is ([0-9]+)")
_NO_NUMBER = "must be a finite number"
_OTHER_ENDPOINT_ERRORS = ("Its client talks to another address", "NotFoundError", "APIConnectionError", "ConnectError")


def rollout_findings(evidence: Evidence) -> Iterator[Finding]:
    """All findings about rollouts and how they ended."""
    episodes = evidence.episodes
    if not episodes:
        yield note("nothing_ran", "No rollout has finished yet, so there is nothing to look at.")
        return
    yield from _failed(episodes)
    yield from _calls(evidence)
    yield from _several_answers(evidence)
    yield from _truncated(evidence)
    yield from _rewards(evidence)


def outcomes(episodes: Sequence[Episode]) -> dict[str, int]:
    """Counts rollouts by outcome, the most frequent first."""
    return dict(Counter(e.outcome.value for e in episodes).most_common())


def ids(episodes: Sequence[Episode]) -> list[str]:
    """The ids of the last few rollouts, as examples for the reader."""
    return [e.rollout.rollout_id for e in episodes[-EXAMPLES:]]


def _failed(episodes: Sequence[Episode]) -> Iterator[Finding]:
    failed = [e for e in episodes if not e.good and e.outcome is not Outcome.CANCELLED]
    silent = [e for e in failed if any(words in first_line(e) for words in _NO_REWARD)]
    wrong = [e for e in failed if _NO_NUMBER in first_line(e)]
    others = [e for e in failed if e not in silent and e not in wrong]
    if silent:
        yield problem(
            "no_reward",
            f"{share(len(silent), len(episodes))} rollouts ended without a reward.",
            "Return a number from the agent on every way out of it, or call agl.emit_reward(…) before it ends; a "
            "program prints it or posts it.",
            affected=len(silent),
            rollouts=ids(silent),
        )
    if wrong:
        yield problem(
            "reward_not_finite",
            f"{share(len(wrong), len(episodes))} rollouts gave a reward that is no finite number: "
            f"{first_line(wrong[-1])}",
            "Look for a division by zero or a missing value in the reward, and return a number or raise an error.",
            affected=len(wrong),
            rollouts=ids(wrong),
        )
    if len(others) < max(1, MANY * len(episodes)):
        return
    yield most_fail(others, len(episodes))


def _calls(evidence: Evidence) -> Iterator[Finding]:
    """Did the agent ask the model, and were its calls recorded with their tokens?"""
    if evidence.provider:
        return
    reached = [e for e in evidence.episodes if e.good or e.refused or _called_other_endpoint(e)]
    calls = [c for e in reached for c in e.calls]
    if reached and not calls:
        endpoint = _other_endpoint(evidence, reached)
        if endpoint:
            where, client, episodes = endpoint
            yield problem(
                "calls_not_captured",
                f"The agent's client{f' ({client})' if client else ''} asks a model at {where}, not the one in "
                "training: its calls are seen, and their tokens are not.",
                "Give its client the endpoint of the rollout: OpenAI(base_url=llm.endpoint, api_key=llm.api_key), "
                "model=llm.model.",
                address=where,
                client=client,
                rollouts=ids(episodes),
            )
        else:
            found = never_called(reached, evidence.refused_requests, evidence.caches)
            error = next((first_line(e) for e in reached if _called_other_endpoint(e)), "")
            sentence = f"{found.words} It said: {error}" if error and found.code == "never_called" else found.words
            yield replace(found, words=sentence)
        return
    yield from _answers_kept(reached, evidence.caches)
    trained = [c for c in calls if c.info.trained]
    empty = [c for c in trained if not len(c.response_ids) and c.info.error is None]
    if calls and not trained:
        chosen_by = {name: evidence.settings[name] for name in SELECTING if evidence.settings.get(name)}
        yield nothing_trained(reached, chosen_by)
    elif empty and (nothing := asks_for_nothing(empty)) and len(empty) >= MOST * len(trained):
        yield nothing
    elif trained and len(empty) >= MOST * len(trained):
        yield problem(
            "token_ids_missing",
            f"{share(len(empty), len(trained))} calls were recorded without token ids, so they cannot be trained.",
            "The engine must return token ids and log-probs: with vLLM behind the gateway take the vllm backend.",
            calls=len(empty),
        )


def _answers_kept(reached: Sequence[Episode], caches: Sequence[str]) -> Iterator[Finding]:
    """Rollouts that were rewarded without any call, where others of the same agent called the model."""
    rated = [e for e in reached if e.good and e.reward is not None]
    silent = [e for e in rated if not e.calls and not e.refused]
    if silent and len(silent) >= MANY * len(rated):
        yield warning(
            "answers_kept",
            f"{share(len(silent), len(rated))} rollouts earned a reward without a call of the model; others called it.",
            asks_itself(caches),
            rollouts=ids(silent),
        )


def _other_endpoint(evidence: Evidence, episodes: Sequence[Episode]) -> tuple[str, str, list[Episode]] | None:
    """Which other address the agent's model calls went to, by which client, and in which rollouts."""
    seen: list[tuple[str, str, Episode]] = []
    for e in episodes:
        for span in evidence.spans.get(e.rollout.rollout_id, ()):
            a = span.attributes
            if span.name == OTHER_ENDPOINT:
                seen.append((str(a.get("url.full")), str(a.get("user_agent.original", "")), e))
            elif a.get("gen_ai.operation.name") == "chat" and a.get("error.type") != "refused":
                seen.append((str(a.get("server.address") or a.get("gen_ai.provider.name") or "another place"), "", e))
    if not seen:
        return None
    where, client, _ = seen[-1]
    return where, client, [e for _, _, e in seen]


def _called_other_endpoint(episode: Episode) -> bool:
    error = (episode.attempt and episode.attempt.error) or ""
    return not episode.good and any(words in error for words in _OTHER_ENDPOINT_ERRORS)


def _several_answers(evidence: Evidence) -> Iterator[Finding]:
    """Requests for more than one answer, all of which are learned with what the rollout earned."""
    choices: dict[tuple[str, str], set[int]] = {}
    for info in (c.info for e in evidence.episodes for c in e.calls):
        choices.setdefault((info.rollout_id, info.response_id), set()).add(info.choice)
    requests = [len(numbers) for numbers in choices.values()]
    several = [count for count in requests if count > 1]
    if several and len(several) >= MANY * len(requests):
        yield warning(
            "several_answers",
            f"{share(len(several), len(requests))} requests ask for several answers, up to n={max(several)}. All are "
            "learned with what the rollout earns, also those that the agent did not use.",
            "Leave n out: group_size already runs each task several times. An agent that chooses among answers asks "
            "for each in a request of its own.",
            answers=max(several),
        )


def _truncated(evidence: Evidence) -> Iterator[Finding]:
    episodes = evidence.episodes
    too_long = [e for e in episodes if _says(e, TOO_LONG)]
    cut = [e for e in episodes if e.outcome is Outcome.TRUNCATED and e not in too_long]
    if too_long and len(too_long) >= MANY * len(episodes) / 2:
        yield (problem if len(too_long) >= MOST * len(episodes) else warning)(
            "prompts_too_long",
            f"In {share(len(too_long), len(episodes))} rollouts a prompt did not fit the model's context"
            f"{_context(evidence, too_long)}.",
            _endless_loop(too_long) + _shorter(evidence, too_long),
            affected=len(too_long),
            rollouts=ids(too_long),
        )
    if cut and len(cut) >= MANY * len(episodes):
        yield (problem if len(cut) >= MOST * len(episodes) else warning)(
            "truncated",
            f"{share(len(cut), len(episodes))} rollouts were ended by a limit of the run (max_calls, max_tokens or "
            "max_context) before they had come to an end.",
            "Raise the limit; if answers run on and on, set overlong_tokens, which punishes length.",
            rollouts=ids(cut),
        )
    trained = [(e, c) for e in episodes if e not in cut for c in e.calls if c.info.trained]
    short = [(e, c) for e, c in trained if c.info.finish_reason == "length"]
    if short and len(short) >= MANY * len(trained):
        yield warning(
            "answers_cut_off",
            f"{share(len(short), len(trained))} answers were cut off at the max_tokens of their request.",
            "Raise max_tokens in the agent's request; if answers run on and on, set overlong_tokens, which punishes "
            "length.",
            rollouts=ids(list({e.rollout.rollout_id: e for e, _ in short}.values())),
        )


def _says(episode: Episode, words: Sequence[str]) -> bool:
    error = (episode.attempt and episode.attempt.error) or ""
    return any(word in text for text in (error, *episode.refused) for word in words)


def _endless_loop(too_long: Sequence[Episode]) -> str:
    """What mends an agent whose own loop does not end."""
    if (calls := statistics.median(len(e.calls) for e in too_long)) < MANY_CALLS:
        return ""
    return (
        f"The agent had asked the model {calls:.0f} times by then: if it loops until an answer is right, end its loop "
        "after some calls (for _ in range(8): …), or set max_calls. "
    )


def _shorter(evidence: Evidence, too_long: Sequence[Episode]) -> str:
    limit, named = evidence.settings.get("max_context"), _longest(too_long)
    if limit is None or named is None or named >= limit:
        return SHORTER_PROMPTS
    return SHORTER_PROMPTS.replace("Raise max_context if the model can do more; else", "The model can do no more:", 1)


def _context(evidence: Evidence, too_long: Sequence[Episode]) -> str:
    """How long one may be: what the model can do, where a refusal names it, is often less than what is set."""
    limit, named = evidence.settings.get("max_context"), _longest(too_long)
    if named is not None and named != limit:
        return f" of {named} tokens"
    return f" (max_context={limit})" if limit else ""


def _longest(too_long: Sequence[Episode]) -> int | None:
    """How long a prompt may be, as a refusal says it."""
    texts = [text for e in too_long for text in ((e.attempt and e.attempt.error) or "", *e.refused)]
    return next((int(found[1]) for text in texts if (found := _LONGEST.search(text))), None)


def _rewards(evidence: Evidence) -> Iterator[Finding]:
    if evidence.settings.get("credit") == "teacher" or evidence.supervised:
        return  # rewards play no part
    rated = [e for e in evidence.episodes if e.good and e.reward is not None]
    if (nobody := unmatched_agents(rated, evidence.settings.get("policies") or ())) is not None:
        yield nobody
    yield from _rewarded_twice(rated, evidence)
    yield from _content_is_a_list(rated)
    if len(rated) >= 8 and evidence.is_flat([e for e in (*evidence.early, *rated) if e.reward is not None]):
        yield problem(
            "constant_reward",
            f"{'The only rollout' if len(rated) == 1 else f'Every one of {len(rated)} rollouts'} earned "
            f"{rated[0].reward:g}: there is nothing to learn from.",
            _out_of_constant(rated[0].reward or 0.0, evidence),
            reward=rated[0].reward,
        )
        return
    groups = evidence.groups
    flat = [group for group in groups if evidence.is_flat(group)]
    learned = evidence.solved and len(evidence.steps) > 2
    if len(groups) < 4 or len(flat) < 0.7 * len(groups) or learned:
        return
    low, high = min(evidence.rewards), max(evidence.rewards)
    hard = sum(group[0].reward == low for group in flat)
    easy = sum(group[0].reward == high for group in flat)
    words = f"In {share(len(flat), len(groups))} groups all siblings earned the same, so they taught nothing"
    numbers = {"flat_groups": len(flat), "groups": len(groups), "lowest": hard, "highest": easy}
    if hard > 0.6 * len(flat):
        code, why = "too_hard", f": {hard} of them always the lowest reward. The tasks are too hard."
        fix = "Start with easier tasks, give partial rewards, or raise group_size so that a rare success is seen."
    elif easy > 0.6 * len(flat):
        code, why = "too_easy", f": {easy} of them always the highest reward. The tasks are too easy."
        fix = "Take harder tasks, or set dynamic_sampling=2, which replaces groups that teach nothing."
    elif _ignores_the_answer(flat):
        code, why = "reward_ignores_answer", ", whatever they said; rewards differ from task to task alone."
        fix = "Rate a right and a wrong answer to one task by hand: where both earn the same, mend the reward."
    else:
        code, why = "no_variance", ". Tasks are either solved every time or never."
        fix = "Set dynamic_sampling=2, raise group_size or temperature, or give partial rewards."
    yield (problem if len(flat) >= 0.95 * len(groups) else warning)(code, words + why, fix, **numbers)


def _rewarded_twice(rated: Sequence[Episode], evidence: Evidence) -> Iterator[Finding]:
    """Rollouts that end with two rewards that differ, of which only the last counts."""
    if evidence.settings.get("credit", "broadcast") != "broadcast":
        return  # each reward goes to the calls before it
    by_itself = [e for e in rated if not e.rollout.metadata.get(REWARDED_LATER)]
    twice = [(e, ends) for e in by_itself if len(set(ends := _last_rewards(e))) > 1]
    if twice and len(twice) >= MANY * len(rated):
        episode, ends = twice[-1]
        yield warning(
            "rewarded_twice",
            f"{share(len(twice), len(rated))} rollouts have several rewards after their last call, such as "
            f"{' and '.join(f'{value:g}' for value in ends[-2:])}. The last one counts: {episode.reward:g}.",
            "Give one: return it, or call agl.emit_reward(…) once and return None. Parts of a reward are recorded "
            "together: agl.emit_reward({…}, primary_key='the one that trains').",
            rollouts=ids([e for e, _ in twice]),
        )


_WHERE_TEXT_IS = {
    "responses": "In the Responses API it is response.output_text",
    "messages": "In Anthropic's API it is message.content[0].text",
}


def _content_is_a_list(rated: Sequence[Episode]) -> Iterator[Finding]:
    """Rewards that are all 0 in a wire format whose answers are lists, in which no text is found."""
    dialects = {c.info.dialect for e in rated for c in e.calls if c.info.trained}
    if len(rated) < 4 or any(e.reward for e in rated) or len(dialects) != 1 or not dialects <= _WHERE_TEXT_IS.keys():
        return
    yield warning(
        "content_is_a_list",
        f"Every one of {len(rated)} rollouts earned 0, and in the API that the agent asks by, message.content is a "
        "list:  'text' in message.content  is never true, whatever the model says.",
        f"Rate the text. {_WHERE_TEXT_IS[dialects.pop()]}. If the reward does that, the tasks are too hard so far.",
    )


def _last_rewards(episode: Episode) -> list[float]:
    """The rewards of everybody's that came after the last call."""
    last = len(episode.calls) - 1
    return [r.value for r in episode.rewards if r.agent is None and not r.named and r.call == last and last >= 0]


def _out_of_constant(reward: float, evidence: Evidence) -> str:
    """What to try where all rollouts earn the same."""
    model = evidence.settings.get("model")
    if reward <= 0 and model in KNOWS:
        return examples_first(model)
    check = "Check the reward on an answer you know to be right and one you know to be wrong. If it tells them apart, "
    if reward > 0 or evidence.provider:
        return check + "take easier tasks (always low) or harder ones (always high), or give partial rewards."
    return f"{check}the tasks are too hard for the model as it is. {examples_first(model)}"


def _ignores_the_answer(flat: Sequence[Sequence[Episode]]) -> bool:
    """Whether siblings differ in what they said and never in what they earned, which is more than right or wrong."""
    several = [len({b"|".join(c.response_ids.tobytes() for c in e.calls) for e in group}) > 1 for group in flat]
    return len({group[0].reward for group in flat}) > 2 and sum(several) > 0.9 * len(several)


def difficulty(groups: Sequence[Sequence[Episode]], low: float, high: float) -> dict[str, dict[str, float]]:
    """Groups by how much of the range of rewards their siblings earn on average: how many, and what."""
    found: dict[str, list[float]] = {"never": [], "seldom": [], "often": [], "always": []}
    for group in groups:
        mean = statistics.mean(e.reward or 0.0 for e in group)
        part = (mean - low) / (high - low) if high > low else float(high > 0)
        name = "never" if part <= 0.02 else "seldom" if part < 0.5 else "often" if part < 0.98 else "always"
        found[name].append(mean)
    return {name: {"groups": len(m), "reward": statistics.mean(m) if m else 0.0} for name, m in found.items()}
