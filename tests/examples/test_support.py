"""The support example without tau2: its cases, its scripted user, its demonstrations."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from agentlightning.cli.configuration import make_algorithm
from examples.calc.tokenizer import make_tokenizer
from examples.support import cases, demonstrations, recipe
from examples.support.cases import KINDS, SIZES, make_case, make_tasks, write_data
from examples.support.demonstrations import ASK_TASK, ASK_TITLE, MIXED, SKILL, Talk, shown
from examples.support.desk import Desk
from examples.support.measure import Conversation
from examples.support.script import STOP, Script, commands, in_first_person
from examples.tools.make_model import make_renderer, row_of

ROOT = Path(__file__).parents[2]


def test_a_user_speaks_of_themselves() -> None:
    assert in_first_person("You are Emma Kim.\nYour user id is emma_1.") == "I am Emma Kim.\nMy user id is emma_1."
    assert in_first_person("Young people find you.") == "Young people find I."


def test_a_question_is_answered_with_the_fact_that_it_is_about() -> None:
    script = Script("You want a refund.", "You are Emma Kim.\nYour user id is emma_1.\nYour order was 12.")
    assert script.opening() == "I want a refund."
    assert script.reply("What is your user id?") == "My user id is emma_1."
    assert script.reply("Which order?") == "My order was 12."
    assert script.reply("Pardon?") == "I am Emma Kim.\nMy user id is emma_1.\nMy order was 12."
    assert script.reply("It is done.") == STOP
    assert Script("You want a refund.").reply("Why?") == "I want a refund."


def test_a_user_does_what_they_are_told_by_name() -> None:
    tools = {"toggle_roaming", "grant_app_permission"}
    said = "Do toggle_roaming(), then grant_app_permission(app_name='messaging', permission='sms') and reboot()."
    permission = {"app_name": "messaging", "permission": "sms"}
    assert commands(said, tools) == [("toggle_roaming", {}), ("grant_app_permission", permission)]
    assert commands("Please toggle roaming. toggle_roaming(x=1+) toggle_roaming(y)", tools) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_can_be_solved_and_not_by_doing_nothing(kind: str) -> None:
    rng = random.Random(kind)
    for _ in range(30):
        case = make_case(rng, kind)
        idle, right = Conversation(case), Conversation(case)
        for talk in (idle, right):
            talk.said.append(f"It is {case.task_id}." if talk is right else "Done.")
            talk.over = True
        for name, arguments in case.actions():
            answer = right.desk.carry_out(name, arguments)
            assert not answer.startswith("Error")
        assert right.solved()
        assert not idle.solved()
        owned = [name for user in case.database["users"].values() for name in user["tasks"]]
        assert sorted(owned) == sorted(case.database["tasks"])


def test_what_has_to_be_asked_for_is_known_only_by_asking() -> None:
    rng = random.Random(0)
    for kind, question in (("create_untitled", ASK_TITLE), ("finish_which", ASK_TASK)):
        case = make_case(rng, kind)
        hidden = case.title if kind == "create_untitled" else case.task_id
        script = Script(case.reason, "\n".join(case.known))
        assert hidden not in script.opening()
        assert hidden in script.reply(question)


def test_only_those_in_the_database_are_found_there() -> None:
    rng = random.Random(0)
    for kind in KINDS:
        case = make_case(rng, kind)
        names = [user["name"] for user in case.database["users"].values()]
        assert any(name in case.reason for name in names) == (kind != "stranger")


def test_no_case_is_in_two_parts(tmp_path: Path) -> None:
    tasks = write_data(tmp_path)
    assert {part: len(rows) for part, rows in tasks.items()} == SIZES
    texts = [json.dumps({**row["task"], "id": ""}) for rows in tasks.values() for row in rows]
    assert len(set(texts)) == len(texts)
    assert make_tasks() == tasks, "the same each time"
    assert [json.loads(line) for line in (tmp_path / "val.jsonl").read_text().splitlines()] == tasks["val"]
    kinds = Counter(row["task"]["description"]["purpose"] for row in tasks["test"])
    assert kinds == dict.fromkeys(KINDS, SIZES["test"] // len(KINDS))


def test_a_case_of_a_part_is_not_demonstrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where nearly all that are drawn are such cases."""
    rows = [row["task"] for part in ("val", "test") for row in make_tasks()[part]]
    held = [row["initial_state"]["initialization_data"]["agent_data"] for row in rows]
    rng, drawn = random.Random(0), []

    def draw(rng: random.Random, kind: str) -> cases.Case:
        case = make_case(rng, kind)
        drawn.append(replace(case, database=rng.choice(held)) if rng.random() < 0.8 else case)
        return drawn[-1]

    shown_cases: list[cases.Case] = []
    monkeypatch.setattr(demonstrations, "make_case", draw)
    monkeypatch.setattr(demonstrations, "shown", lambda case, *_: shown_cases.append(case))
    for _ in range(50):
        demonstrations.demonstrate(rng, SKILL)
    assert len(shown_cases) == 50 < len(drawn)
    assert not any(case.database in held for case in shown_cases)


def test_demonstrations_of_skill_are_mostly_right_and_mixed_ones_mostly_not() -> None:
    shares: dict[str, Counter[str]] = {}
    for name, weights in (("skill", SKILL), ("mixed", MIXED)):
        rng, shares[name] = random.Random(0), Counter()
        for _ in range(800):
            case = make_case(rng, rng.choice(KINDS))
            shares[name][case.kind] += _solved(case, shown(case, rng, weights))
    assert shares["skill"].total() > 0.9 * 800
    assert 0.2 < shares["mixed"].total() / 800 < 0.4
    assert all(shares["mixed"][kind] > 10 for kind in KINDS), "some of each kind, so that there is something to choose"


def _solved(case: cases.Case, done: object) -> bool:
    """Carry out what a demonstration says, and see whether that solves the case."""
    talk = Conversation(case)
    turns, results = vars(done)["turns"], vars(done)["results"]
    for n, turn in enumerate(turns):
        if turn.startswith("<tool_call>"):
            said = json.loads(turn.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            assert talk.desk.carry_out(said["name"], said["arguments"]) == results[n]
        else:
            talk.said.append(turn)
            reply = talk.script.reply(turn)
            talk.over = reply == STOP
            assert talk.over == (n == len(turns) - 1), "the user leaves at the end and not before"
            assert talk.over or results[n].text == reply
    return talk.solved()


def test_a_tool_that_is_called_wrongly_says_so() -> None:
    desk = Desk(make_case(random.Random(0), "finish").database)
    assert desk.carry_out("create_task", {"user_id": "user_0", "title": "A"}) == "Error: User user_0 not found"
    assert desk.carry_out("update_task_status", {"task_id": "task_0", "status": "x"}) == "Error: Task task_0 not found"
    for name, arguments in (("create_task", {}), ("delete_task", {}), ("get_users", [1]), ("get_users", {"a": 1})):
        assert desk.carry_out(name, arguments).startswith("Error: ")


def test_what_the_user_says_is_rendered_and_not_learnt() -> None:
    rng = random.Random(0)
    told = shown(make_case(rng, "create_untitled"), rng, dict.fromkeys(SKILL, 1.0))
    texts = [*(message["content"] for message in told.messages), *told.turns]
    tokenizer = make_tokenizer([*texts, json.dumps(told.tools)] * 20, 600)
    ids, targets = row_of(told, tokenizer, make_renderer(tokenizer))
    whole = str(tokenizer.decode(ids, skip_special_tokens=False))
    answer = next(result.text for result in told.results if not isinstance(result, str))
    assert f"<|im_start|>assistant\n{ASK_TITLE}<|im_end|>\n<|im_start|>user\n{answer}<|im_end|>" in whole
    learnt = str(tokenizer.decode([i for i in targets if i >= 0], skip_special_tokens=False))
    assert learnt == "".join(f"{turn}<|im_end|>" for turn in told.turns)


def test_a_talk_keeps_what_came_back() -> None:
    talk = Talk(make_case(random.Random(0), "create_untitled"))
    talk.use("get_users")
    talk.ask(ASK_TITLE)
    talk.end("Done.")
    assert len(talk.turns) == 3
    assert [isinstance(result, str) for result in talk.results] == [True, False]


def test_the_files_of_settings_are_settings() -> None:
    for name, model in (("config.gpu.yaml", "Qwen/Qwen3-8B"), ("config.yaml", "calc")):
        assert make_algorithm(None, None, ROOT / "examples" / "support" / name, []).model == model
    assert yaml.safe_load((ROOT / "examples" / "support" / "config.yaml").read_text()) == recipe.SETTINGS
