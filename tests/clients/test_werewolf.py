"""`examples/werewolf` with the real AgentScope, before an engine whose players name whom a rule says: who is asked by
which model, that every call goes on from the tokens of the one before, and what the small model is taught.
"""

from __future__ import annotations

import random
import re

import pytest
from transformers import AutoTokenizer

from agentlightning import Provider
from agentlightning.gateway import Gateway
from agentlightning.gateway.routing.models import Frozen
from agentlightning.models import resolve_model
from agentlightning.rendering import load_rendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Outcome, RolloutMode
from agentlightning.types.names import MESSAGE_BODY, REWARD_AGENT
from agentlightning.types.reward import find_reward_spans, get_rewards
from examples.tools.make_model import make_renderer, row_of
from examples.werewolf.demonstrations import ByRule, Seat, call
from examples.werewolf.game import NAMES, VILLAGE, WOLVES, Game, Rules
from examples.werewolf.moderator import Moderator
from examples.werewolf.prompts import Move
from tests.clients.conftest import Run, SayingEngine, WitnessedEngine, World, carried_out
from tests.clients.test_werewolf_training import framework

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("default"),  # other people's packages
]

SEEDS = range(3)


def _move(name: str, question: str) -> Move:
    """Of those alive the one who sits after the player; of all, where it is not told who is alive."""
    alive = question.rpartition("Alive: ")[2].rstrip(".").split() if "Alive" in question else list(NAMES)
    after = [other for other in alive if other > name] or alive
    return Move.model_validate({"say": "Villager.", "name": after[0]})


def _say(prompt: str) -> str:
    name = re.findall(r"You are (\w+),", prompt)[0]
    return call(_move(name, re.findall(r"Moderator: (.*)", prompt)[-1]))


def _think(prompt: str) -> str:
    return f"<think>\nThey must not know.\n</think>\n\n{_say(prompt)}"


class _AsTheEngine(ByRule):
    """Players who answer as the engine does."""

    def _move(self, name: str, text: str) -> Move:
        return self.seats[name].answer(_move(name, text))


async def _played(
    world: World, say: object, rules: dict[str, object] | None = None, village: Provider | None = None
) -> Run:
    framework()
    from examples.werewolf.werewolf_agent import werewolf_agent

    engine = WitnessedEngine(SayingEngine(world.process, say))  # pyright: ignore[reportArgumentType]
    rendering, store = load_rendering(resolve_model("calc")), InMemoryLightningStore()
    gateway = Gateway(store, engine, rendering, policy=WOLVES, models={VILLAGE: village or Frozen(engine, rendering)})
    tasks = [{"seed": seed, "rules": rules or {}} for seed in SEEDS]
    run = await carried_out(werewolf_agent, tasks, engine, store, gateway)
    assert {r.attempt.outcome for r in run.rollouts} == {Outcome.OK}, {r.attempt.error for r in run.rollouts}
    return run


async def _by_rule(seed: int) -> tuple[str | None, dict[str, Seat]]:
    game = Game.deal(seed)
    table = _AsTheEngine(game, random.Random(0), {})
    return await Moderator(game, table, Rules()).play(), table.seats


async def test_every_decision_is_one_call_that_goes_on_from_the_players_last(world: World) -> None:
    run = await _played(world, _say)
    played = {(rollout, c.info.agent) for rollout, calls in run.calls.items() for c in calls}
    assert run.exact() == len(run.all_calls()) > 100
    assert run.continued() == len(run.all_calls()) - len(played)
    for rollout in run.rollouts:
        roles = Game.deal(rollout.input["seed"])
        for one in run.calls[rollout.rollout_id]:
            assert one.info.agent in NAMES
            assert one.info.policy == roles.camp(one.info.agent)
            assert one.info.trained == (one.info.policy == WOLVES), "the village stays as it is"


async def test_another_providers_model_may_play_the_village(world: World) -> None:
    """The provider is a gateway of its own. What it says is heard, and only the werewolves' tokens are kept."""
    engine = SayingEngine(world.process, _say)  # pyright: ignore[reportArgumentType]
    rendering, store = load_rendering(resolve_model("calc")), InMemoryLightningStore()
    async with Gateway(store, engine, rendering, policy="far") as gateway:
        far = await store.start_rollout(input={}, mode=RolloutMode.VAL)
        key = gateway.key_for(far.rollout_id, far.attempt.attempt_id)
        run = await _played(world, _say, village=Provider(base_url=gateway.endpoint, api_key=key, model="far"))
    assert run.exact() == len(run.all_calls())
    for rollout in run.rollouts:
        game, calls = Game.deal(rollout.input["seed"]), run.calls[rollout.rollout_id]
        assert {game.camp(str(one.info.agent)) for one in calls} == {WOLVES}
        told = [str(s.attributes[MESSAGE_BODY]) for s in run.spans[rollout.rollout_id] if MESSAGE_BODY in s.attributes]
        winner, _ = await _by_rule(rollout.input["seed"])
        assert told[-1] == f"{winner or 'Nobody'} won."


async def test_the_small_model_is_taught_what_its_players_are_asked_and_say(world: World) -> None:
    run = await _played(world, _say)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("calc"))
    renderer = make_renderer(tokenizer)
    for rollout in run.rollouts:
        last = {c.info.agent: c for c in run.calls[rollout.rollout_id]}
        _, seats = await _by_rule(rollout.input["seed"])
        assert set(last) == {name for name, seat in seats.items() if seat.moves}
        for name, one in last.items():
            said = [*one.prompt_ids.tolist(), *one.response_ids.tolist()]
            assert said == row_of(seats[str(name)].demonstration(), tokenizer, renderer)[0], name


async def test_the_game_is_told_and_every_player_is_rewarded(world: World) -> None:
    run = await _played(world, _say)
    for rollout in run.rollouts:
        spans, game = run.spans[rollout.rollout_id], Game.deal(rollout.input["seed"])
        winner, _ = await _by_rule(rollout.input["seed"])
        told = [str(span.attributes[MESSAGE_BODY]) for span in spans if MESSAGE_BODY in span.attributes]
        assert told[0].startswith(f"Moderator to Ana: You are Ana, {game.roles['Ana']}")
        assert told[-1] == f"{winner or 'Nobody'} won."
        rewards = [(str(s.attributes[REWARD_AGENT]), get_rewards(s)) for s in find_reward_spans(spans)]
        assert dict(rewards) == {name: {"won": float(game.camp(name) == winner)} for name in NAMES}
        assert {part for _, parts in rewards for part in parts} >= {"vote", "alive", "won"}


async def test_what_a_player_thinks_no_other_player_hears(world: World) -> None:
    run = await _played(world, _think, {"rounds": 1})
    assert "must not know" in world.rendering.decode(run.all_calls()[0].response_ids)
    for calls in run.calls.values():
        for one in calls:
            shown = world.rendering.decode(one.prompt_ids)
            own = [c for c in calls if c.info.agent == one.info.agent and c.info.start_time < one.info.start_time]
            assert shown.count("must not know") <= len(own)


async def test_a_player_whose_answer_is_no_move_has_not_voted(world: World) -> None:
    """The engine stops in the middle of the call, as one that runs out of tokens does."""
    run = await _played(world, lambda prompt: "<tool_call>\n{", {"rounds": 1})
    told = [str(s.attributes.get(MESSAGE_BODY)) for s in run.spans[run.rollouts[0].rollout_id]]
    assert "Nobody won." in told
    assert any(line.endswith("Nobody left.") for line in told)
