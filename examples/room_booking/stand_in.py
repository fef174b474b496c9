"""A stand-in for language models, for tests and for trying the example offline. IT IS NO LANGUAGE MODEL.

It answers over the OpenAI API by fixed rules, and the same question always alike:

- Asked as model `agent`, it calls the tool and picks a room. Of the five rules in `RULES` it always follows those that
  its prompt states (found by a word); any other it forgets on a fixed share of the requests.
- Asked as model `critic`, it answers the questions of APO and GEPA: it names a rule that the prompt lacks, and adds its
  sentence. Now and then it does what critics do wrong: an edit that changes nothing useful, one that loses the
  placeholder, one without the asked form, a refusal, an error.

So a run shows that an optimiser works as a machine: it evaluates, asks, edits, selects, and keeps to its budget. It
shows nothing about what a prompt does to a real model.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

from examples.room_booking.rooms import Room, is_free


class Rule(NamedTuple):
    """Something to heed when a room is picked."""

    word: str
    """A prompt that has this word states the rule."""
    sentence: str
    """What the critic adds."""
    forgotten: int
    """On so many of 100 requests, where it is not stated."""


RULES = {
    "seats": Rule("capacity", "Take only rooms whose capacity is enough for all people.", 45),
    "items": Rule("equipment", "Take only rooms that have all the equipment that is asked for.", 55),
    "free": Rule("overlap", "Leave out rooms with a booking that would overlap the meeting.", 50),
    "step_free": Rule("accessible", "Where step-free entry is asked for, take only accessible rooms.", 70),
    "smallest": Rule("smallest", "Of all rooms that are possible, take the smallest.", 70),
}
USELESS = "Be friendly and thorough."
_REQUEST = re.compile(r"We are (\d+) people and meet on (\S+) at (\S+) for (\d+) minutes\.( We need [^.]*\.)?")


def draw(*parts: object) -> int:
    """A number from 0 to 99 that looks random and is always the same for the same parts."""
    return int(hashlib.sha256(json.dumps(parts).encode()).hexdigest(), 16) % 100


# ---- as the agent's model -------------------------------------------------------------------------------------------


def agent_answer(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A tool call first, then the id of a room."""
    prompt = "\n".join(m["content"] for m in messages if m["role"] in ("system", "developer", "user"))
    asked = _REQUEST.search(prompt)
    if asked is None:
        return {"content": "I do not understand the request."}
    if messages[-1]["role"] != "tool":
        arguments = json.dumps({"date": asked[2]})
        call = {"name": "get_rooms_and_availability", "arguments": arguments}
        return {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": call}]}
    return {"content": f"Take room {pick(prompt, asked, json.loads(messages[-1]['content']))}."}


def pick(prompt: str, asked: re.Match[str], rooms: Sequence[Room]) -> str:
    """The room by the rules that are remembered."""
    heeded = {n for n, r in RULES.items() if r.word in prompt.lower() or draw(n, asked[0]) >= r.forgotten}
    wishes = asked[5] or ""
    left = [
        room
        for room in rooms
        if ("seats" not in heeded or room["seats"] >= int(asked[1]))
        and ("items" not in heeded or all(i in room["items"] for i in re.findall(r"a (\w+)", wishes)))
        and ("step_free" not in heeded or room["step_free"] or "step-free" not in wishes)
        and ("free" not in heeded or is_free(room, asked[3], int(asked[4])))
    ]
    ordered = sorted(left, key=lambda r: r["seats"] if "smallest" in heeded else draw(r["id"], asked[0]))
    return ordered[0]["id"] if ordered else "none"


# ---- as the critic ---------------------------------------------------------------------------------------------------


def critic_answer(prompt: str) -> str | int | None:
    """What it says; a number is an HTTP error, None a refusal."""
    luck = draw("luck", prompt)
    if luck < 4:
        return None
    if luck < 6:
        return 400
    template = template_in(prompt)
    missing = [name for name, rule in RULES.items() if rule.word not in template.lower()]
    if "A reviewer says" in prompt:
        return (
            f"<new_template>\n{improved(template, sentence_in(prompt), luck)}\n</new_template>" if luck < 95 else "No."
        )
    sentence = RULES[missing[draw("choice", prompt) % len(missing)]].sentence if missing and luck < 80 else USELESS
    if "```" in prompt:  # GEPA asks for the new text at once
        return f"```\n{improved(template, sentence, luck)}\n```"
    return f"The agent earns less than it could because the template does not say: «{sentence}»"


def template_in(prompt: str) -> str:
    """The template that a question is about: a JSON string of its own line for APO, the first block for GEPA."""
    if "```" in prompt:
        return prompt.split("```")[1].strip()
    line = next(line for line in prompt.splitlines() if line.startswith('"'))
    return str(json.loads(line))


def sentence_in(prompt: str) -> str:
    found = re.search("«(.*?)»", prompt)
    return found[1] if found else USELESS


def improved(template: str, sentence: str, luck: int) -> str:
    """With the sentence at its beginning, after the first line."""
    first, _, rest = template.partition("\n")
    text = f"{first}\n{sentence}\n{rest}"
    return text.replace("{request}", "the request") if luck % 10 == 7 else text


# ---- the server ------------------------------------------------------------------------------------------------------


class StandIn:
    """The server, and what it was asked: `answered` counts equal questions by model and content."""

    def __init__(self, log: Path | None = None, hold_after: int | None = None) -> None:
        self.answered: Counter[str] = Counter()
        self._log = log
        self._hold_after = hold_after
        """Answer the agent's model no more after so many calls, as long as the process lives."""
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, port: int = 0) -> str:
        """Its base URL."""
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return f"http://127.0.0.1:{self.port}/v1"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def count(self, model: str) -> int:
        return sum(n for key, n in self.answered.items() if key.startswith(model))

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        model, messages = body["model"], body["messages"]
        if model == "critic":
            said = critic_answer(messages[-1]["content"])
        elif self._hold_after is not None and self.count("agent") >= self._hold_after:
            await request.read()
            await _never()
            raise AssertionError("unreachable")
        else:
            said = agent_answer(messages)
        self._note(f"{model} {hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]}")
        if isinstance(said, int):
            return web.json_response({"error": {"message": "The stand-in fails now and then."}}, status=said)
        refusal = {"content": None, "refusal": "I would rather not."} if said is None else {}
        message = {"role": "assistant", **(said if isinstance(said, dict) else {"content": said}), **refusal}
        used = {"prompt_tokens": len(json.dumps(messages)) // 4, "completion_tokens": len(json.dumps(message)) // 4}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        answer = {"id": f"stand-in-{sum(self.answered.values())}", "object": "chat.completion", "created": 0}
        return web.json_response({**answer, "model": model, "choices": [choice], "usage": used})

    def _note(self, key: str) -> None:
        self.answered[key] += 1
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(key + "\n")


async def _never() -> None:
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=9999)
    parser.add_argument("--log", type=Path, help="write a line per answered question into this file")
    parser.add_argument("--hold-after", type=int, help="answer the agent's model no more after so many calls")
    given = parser.parse_args()

    async def serve() -> None:
        print(await StandIn(given.log, given.hold_after).start(given.port), flush=True)
        await _never()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
