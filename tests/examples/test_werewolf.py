"""The werewolf game without its framework: the rules, what moves earn, and what the small model is taught."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentlightning.cli.configuration import make_algorithm
from agentlightning.trainer.example import load_example
from examples.calc.tokenizer import make_tokenizer
from examples.werewolf import recipe
from examples.werewolf.demonstrations import FIRST, MIXED, SKILL, call, demonstrate, play
from examples.werewolf.game import NAMES, NOBODY, ROLES, VILLAGE, WOLVES, Game, Rules
from examples.werewolf.measure import measure
from examples.werewolf.moderator import Moderator
from examples.werewolf.prompts import MOVE_TOOL, NO_MOVE, Move, role_line, spoken
from examples.werewolf.reward import ALIVE, INVALID, VOTE, of_end, of_survival, of_votes
from examples.werewolf.tasks import SIZES, make_tasks

ROOT = Path(__file__).parents[2]
WOLF_NAMES, SEER, WITCH, HUNTER = ("Ana", "Ben", "Cem"), "Gus", "Hal", "Ivy"


def dealt() -> Game:
    """Ana, Ben and Cem are the werewolves, Gus the seer, Hal the witch, Ivy the hunter."""
    return Game(dict(zip(NAMES, ROLES, strict=True)), random.Random(0))


@dataclass
class Fake:
    """Players who name whom a function of name and question says."""

    names: Callable[[str, str], str]
    heard: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    votes: list[dict[str, str]] = field(default_factory=list)
    alive: list[list[str]] = field(default_factory=list)

    async def tell(self, hearers: Sequence[str], text: str) -> None:
        self.heard.append((tuple(hearers), text))

    async def talk(self, speakers: Sequence[str], hearers: Sequence[str], text: str) -> None:
        await self.tell(hearers, text)
        self.asked += [(name, text) for name in speakers]

    async def ask(self, names: Sequence[str], text: str) -> dict[str, Move]:
        await self.tell(names, text)
        self.asked += [(name, text) for name in names]
        return {name: Move.model_validate({"say": "", "name": self.names(name, text)}) for name in names}

    def voted(self, votes: dict[str, str]) -> None:
        self.votes.append(votes)

    def survived(self, names: Sequence[str]) -> None:
        self.alive.append(list(names))

    def told(self, name: str) -> list[str]:
        return [text for hearers, text in self.heard if name in hearers]


def played(names: Callable[[str, str], str], rules: Rules = Rules(last_words=False)) -> tuple[str | None, Fake, Game]:
    game, fake = dealt(), Fake(names)
    return asyncio.run(Moderator(game, fake, rules).play()), fake, game


def plan(**answers: str) -> Callable[[str, str], str]:
    """Answers by the first word of a question, or by `Name_Word`; nobody otherwise."""

    def names(name: str, text: str) -> str:
        word = text.removeprefix("You die. ").split(".")[0].split()[0]
        word = "Heal" if "Heal" in text else "Kill" if "kill" in text else word
        return answers.get(f"{name}_{word}", answers.get(word, NOBODY))

    return names


def test_the_same_seed_deals_the_same_roles() -> None:
    games = [Game.deal(seed).roles for seed in range(20)]
    assert games == [Game.deal(seed).roles for seed in range(20)]
    assert all(sorted(roles.values()) == sorted(ROLES) for roles in games)
    assert len({tuple(roles.values()) for roles in games}) > 15


def test_the_village_wins_when_no_werewolf_is_left_and_the_wolves_when_they_are_half() -> None:
    game = dealt()
    assert game.winner is None
    game.remove(["Ana", "Ben"])
    assert game.winner is None
    game.remove(["Cem"])
    assert game.winner == VILLAGE
    game = dealt()
    game.remove(["Dia", "Eli"])
    assert game.winner is None
    game.remove(["Fay"])
    assert game.winner == WOLVES


def test_most_votes_for_somebody_alive_count_and_a_draw_among_equals_breaks_ties() -> None:
    game = dealt()
    game.remove(["Dia"])
    assert game.most(["Dia", "Dia", NOBODY, "Eli"]) == "Eli"
    assert game.most(["Dia", NOBODY]) is None
    assert {game.most(["Eli", "Fay", "Eli", "Fay"]) for _ in range(20)} == {"Eli", "Fay"}


def test_a_game_that_the_wolves_win() -> None:
    prey = iter(("Dia", "Fay", "Hal"))
    winner, fake, game = played(lambda name, text: next(prey) if "kill" in text and name == "Ana" else NOBODY)
    assert winner == WOLVES
    assert game.alive == ["Ana", "Ben", "Cem", "Eli", "Gus", "Ivy"]
    assert fake.told("Ana")[:3] == [
        "You are Ana, werewolf with Ben and Cem.",
        "Night 1. Kill whom?",
        "Vote to kill. Alive: Dia Eli Fay Gus Hal Ivy.",
    ], "werewolves are not told their own among those they may kill"
    assert fake.told("Eli")[:2] == ["You are Eli, villager.", "Day 1. Dia died. Who is it?"]
    assert not any("ill" in text and "villager" not in text for text in fake.told("Eli")), (
        "the night is the wolves' own"
    )
    assert fake.alive[0] == [name for name in NAMES if name != "Dia"]


def test_a_game_that_the_village_wins() -> None:
    def names(name: str, text: str) -> str:
        return text.split("Alive: ")[1].split()[0] if text.startswith("Vote. ") else NOBODY

    winner, fake, game = played(names)
    assert winner == VILLAGE
    assert game.alive == list(NAMES[3:])
    by_day = [votes for votes in fake.votes if len(votes) > 3]
    assert [set(votes.values()) for votes in by_day] == [{"Ana"}, {"Ben"}, {"Cem"}]
    assert "Ben left." in fake.told("Cem")
    assert len(fake.alive) == 3


def test_the_witch_heals_once_and_then_may_poison() -> None:
    winner, fake, game = played(plan(Kill="Dia", Heal="Dia", Poison="Ana"), Rules(rounds=1, last_words=False))
    assert winner is None
    assert "Day 1. Nobody died. Who is it?" in fake.told("Dia")
    assert not any("Poison" in text for _, text in fake.asked), "not in the night in which she heals"
    _, fake, game = played(plan(Kill="Dia", Heal="Dia", Poison="Ana"), Rules(rounds=2, last_words=False))
    assert "Day 2. Dia and Ana died. Who is it?" in fake.told("Eli")
    assert game.potions == set()


def test_the_witch_cannot_heal_herself() -> None:
    _, fake, game = played(plan(Kill=WITCH, Heal=WITCH), Rules(rounds=1, last_words=False))
    assert not any("Heal" in text for _, text in fake.asked)
    assert WITCH not in game.alive


def test_the_seer_is_told_a_role_and_nobody_else_is() -> None:
    _, fake, _ = played(plan(Check="Ben"), Rules(rounds=1, last_words=False))
    assert [hearers for hearers, text in fake.heard if text == "Ben is werewolf."] == [(SEER,)]


def test_a_hunter_who_is_killed_or_voted_out_shoots_and_one_who_is_poisoned_does_not() -> None:
    one = Rules(rounds=1, last_words=False)
    assert set(NAMES) - set(played(plan(Kill=HUNTER, Shoot="Ana"), one)[2].alive) == {HUNTER, "Ana"}
    assert set(NAMES) - set(played(plan(Vote=HUNTER, Shoot="Ana"), one)[2].alive) == {HUNTER, "Ana"}
    assert set(NAMES) - set(played(plan(Kill="Dia", Poison=HUNTER, Shoot="Ana"), one)[2].alive) == {"Dia", HUNTER}
    assert set(NAMES) - set(played(plan(Kill=HUNTER, Poison=HUNTER, Shoot="Ana"), one)[2].alive) == {HUNTER}


def test_the_first_victim_and_who_is_voted_out_have_last_words() -> None:
    _, fake, _ = played(plan(Kill="Dia", Vote="Eli"), Rules(rounds=2))
    asked = [(name, text) for name, text in fake.asked if "Last words" in text]
    assert asked[:2] == [("Dia", "Day 1. Dia died. Last words?"), ("Eli", "Eli left. Last words?")]
    assert fake.told("Dia")[-1] == "Day 1. Dia died. Last words?", "the dead hear no more"


def test_all_speak_as_often_as_the_rules_say() -> None:
    _, fake, _ = played(plan(), Rules(rounds=1, discussions=2, last_words=False))
    assert [name for name, text in fake.asked if "Who is it" in text] == [*NAMES, *NAMES]
    assert [name for name, text in fake.asked if "Kill whom" in text] == [*WOLF_NAMES, *WOLF_NAMES]


def test_a_game_that_is_not_decided_is_won_by_nobody() -> None:
    winner, fake, game = played(plan(), Rules(rounds=3))
    assert winner is None
    assert len(fake.alive) == 3
    assert {reward["won"] for reward in of_end(game, winner).values()} == {0.0}


def test_votes_are_worth_what_they_do_to_the_other_camp() -> None:
    game = dealt()
    game.remove(["Dia"])
    votes = {"Ana": "Eli", "Ben": "Ana", "Eli": "Ana", "Fay": "Eli", "Gus": "Dia", "Hal": NOBODY}
    assert of_votes(game, votes) == {
        "Ana": {"vote": VOTE},
        "Ben": {"vote": -VOTE},
        "Eli": {"vote": VOTE},
        "Fay": {"vote": -VOTE},
        "Gus": {"valid": INVALID},
        "Hal": {"valid": INVALID},
    }
    assert of_survival(["Eli"]) == {"Eli": {"alive": ALIVE}}
    assert [name for name, reward in of_end(game, WOLVES).items() if reward["won"]] == list(WOLF_NAMES)


def test_what_players_say_and_hear() -> None:
    move = Move(say="Seer.", name="Ben")
    assert spoken(move) == "Seer. Ben?"
    assert spoken(NO_MOVE) == "Nothing."
    assert role_line(dealt(), "Hal") == "You are Hal, witch."
    with pytest.raises(ValueError, match="name"):
        Move.model_validate({"say": "", "name": "Zoe"})
    assert MOVE_TOOL["function"]["parameters"]["properties"]["name"]["enum"] == [*NAMES, NOBODY]


def test_no_game_is_in_two_parts_or_in_the_demonstrations() -> None:
    tasks = make_tasks()
    assert {part: len(rows) for part, rows in tasks.items()} == SIZES
    seeds = [task["seed"] for rows in tasks.values() for task in rows]
    assert len(set(seeds)) == len(seeds)
    assert max(seeds) < FIRST
    assert Rules(**tasks["train"][0]["rules"]) == Rules(last_words=False)


def test_a_demonstration_is_a_players_part_in_a_game() -> None:
    shown = demonstrate(random.Random(1), SKILL)
    assert [m["role"] for m in shown.messages] == ["system", "user"]
    assert all([m["role"] for m in following] == ["tool", "user"] for following in shown.following())
    assert len(shown.turns) == len(shown.results) + 1
    for turn in shown.turns:
        made = json.loads(turn.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        assert call(Move.model_validate(made["arguments"])) == turn


def test_at_first_only_the_beginnings_of_games_are_shown() -> None:
    most = {
        name: max(len(demonstrate(random.Random(seed), weights).turns) for seed in range(30))
        for name, weights in (("skill", SKILL), ("mixed", MIXED))
    }
    assert most["skill"] == SKILL["shown"]
    assert most["mixed"] > SKILL["shown"]


def test_werewolves_that_are_shown_with_skill_win_and_mixed_ones_mostly_do_not() -> None:
    rng, shares = random.Random(0), {}
    for name, weights in (("skill", {**MIXED, "loyal": 1.0, "lies": 1.0, "blunders": 0.0}), ("mixed", MIXED)):
        shares[name] = sum(play(seed, rng, weights)[0] == WOLVES for seed in range(100)) / 100
    assert shares["skill"] > 0.85
    assert 0.2 < shares["mixed"] < 0.5


def test_every_name_is_one_token_and_a_move_is_short() -> None:
    rng = random.Random(0)
    shown = [demonstrate(rng, MIXED) for _ in range(300)]
    told = [str(m["content"]) for d in shown for messages in (d.messages, *d.following()) for m in messages]
    made = make_tokenizer([*told, *(turn for d in shown for turn in d.turns)], 640)
    for name in (*NAMES, *ROLES):
        assert len(made.encode(f" {name}", add_special_tokens=False)) == 1, name
    assert len(made.encode(call(Move(say="Villager.", name="Ben")), add_special_tokens=False)) < 28


def test_the_files_of_settings_are_settings() -> None:
    yaml = pytest.importorskip("yaml")
    folder = ROOT / "examples" / "werewolf"
    assert yaml.safe_load((folder / "config.yaml").read_text()) == recipe.SETTINGS
    algorithm = make_algorithm(None, None, folder / "config.gpu.yaml", [])
    assert (algorithm.model, list(algorithm.policies), algorithm.frozen) == ("Qwen/Qwen3-1.7B", ["wolves"], "village")


def test_an_answer_that_is_no_move_is_counted_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answers:
        def __init__(self, *_: object) -> None: ...

        async def converse(self, told: list[Any], tools: Any, take: Any, **_: object) -> None:
            for i in range(len(told)):
                await take(i, {"say": "", "name": "Ana" if i % 2 == 0 else "Ana Alive"})

    monkeypatch.setattr(load_example("tools", "batch"), "Batch", Answers)
    assert measure(None, None, games=4).startswith("moves 0.5")


def test_who_is_asked_says_its_role_and_the_words_it_follows() -> None:
    """From which the small model learns who it is, and to find what it has heard."""
    followed = 0
    for seed in range(20):
        roles = Game.deal(FIRST + seed).roles
        for name, seat in play(FIRST + seed, random.Random(seed), SKILL)[1].items():
            heard = ""
            for lines, move in seat.moves:
                heard += "\n".join(lines)
                if "Alive: " in lines[-1]:
                    role, _, words = move.say.partition(". ")
                    assert role.rstrip(".").lower() == roles[name]
                    assert words in heard
                    assert move.name in words or not words
                    followed += bool(words)
    assert followed > 100
