"""What an agent says about itself: rewards, messages, objects, exceptions, annotations and operations, as spans.

Outside a rollout the emitters warn once and do nothing, so that an agent stays an ordinary function.
"""

from agentlightning.emitter.emit import emit_annotation, emit_exception, emit_message, emit_object, emit_reward
from agentlightning.emitter.operation import Operation, operation
from agentlightning.emitter.tools import replayed
from agentlightning.types.reward import (
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    get_rewards,
    is_reward_span,
)

__all__ = [
    "Operation",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "find_final_reward",
    "find_reward_spans",
    "get_reward_value",
    "get_rewards",
    "is_reward_span",
    "operation",
    "replayed",
]
