"""The users that the agent talks to, as classes of tau2: a scripted one, or a language model behind an endpoint."""

from __future__ import annotations

import os
from typing import Any

from tau2.data_model.message import AssistantMessage, MultiToolMessage, ToolCall, UserMessage
from tau2.data_model.tasks import StructuredUserInstructions, Task
from tau2.environment.environment import Environment
from tau2.user.base import BaseUser, UserState
from tau2.user.user_simulator import UserSimulator

from .script import STOP, Script, commands

MODEL, BASE_URL, API_KEY = "SUPPORT_USER_MODEL", "SUPPORT_USER_BASE_URL", "SUPPORT_USER_API_KEY"
"""Environment variables: a model for tau2's own simulator, as litellm names it, where it is, and the key for it."""


def make_user(task: Task, environment: Environment) -> BaseUser:
    """The user of a task: a script, unless the environment names a model."""
    tools = environment.get_user_tools() if environment.user_tools else None
    if model := os.environ.get(MODEL):
        given = {"api_base": os.environ.get(BASE_URL), "api_key": os.environ.get(API_KEY)}
        return UserSimulator(tools, str(task.user_scenario), model, {k: v for k, v in given.items() if v})
    return ScriptedUser(task, {tool.name for tool in tools or ()})


class ScriptedUser(BaseUser):
    """Says why they call, answers questions with what they know, does with their phone what they are told by the name
    of the tool, and leaves when nothing is asked of them. Nothing is left to chance.
    """

    def __init__(self, task: Task, tools: set[str]) -> None:
        told = task.user_scenario.instructions
        super().__init__(instructions=str(task.user_scenario))
        structured = isinstance(told, StructuredUserInstructions)
        self._script = Script(told.reason_for_call, told.known_info or "") if structured else Script(told)
        self._tools = tools
        self._opened = False

    def get_init_state(self, message_history: list[Any] | None = None) -> UserState:
        return UserState(system_messages=[], messages=message_history or [])

    def generate_next_message(self, message: Any, state: UserState) -> tuple[UserMessage, UserState]:
        state.messages.extend(message.tool_messages if isinstance(message, MultiToolMessage) else [message])
        said = self._next(message)
        said.cost = 0.0
        state.messages.append(said)
        return said, state

    def _next(self, message: Any) -> UserMessage:
        if not isinstance(message, AssistantMessage):  # what their own tools answered
            results = message.tool_messages if isinstance(message, MultiToolMessage) else [message]
            return UserMessage(role="user", content="\n".join(result.content or "" for result in results))
        if not self._opened:
            self._opened = True
            return UserMessage(role="user", content=self._script.opening())
        text = message.content or ""
        calls = [
            ToolCall(id=f"user_{len(text)}_{n}", name=name, arguments=arguments, requestor="user")
            for n, (name, arguments) in enumerate(commands(text, self._tools))
        ]
        if calls:
            return UserMessage(role="user", tool_calls=calls)
        return UserMessage(role="user", content=self._script.reply(text))

    @classmethod
    def is_stop(cls, message: UserMessage) -> bool:
        return STOP in (message.content or "")

    def set_seed(self, seed: int) -> None:
        """There is nothing to seed."""
