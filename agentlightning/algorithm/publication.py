"""Publication: what learners have learned becomes what engines sample from."""

from __future__ import annotations

import time
from collections.abc import Mapping

from agentlightning.backend import Backend
from agentlightning.errors import EngineError


class Publisher:
    """Knows which version of each policy is published."""

    def __init__(self, backend: Backend, versions: Mapping[str, int]) -> None:
        """`versions`: those that the engines sample from, by alias."""
        self._backend = backend
        self._versions = dict(versions)
        self.seconds = 0.0
        """How long the last one took."""

    async def publish(self, learned: Mapping[str, int]) -> dict[str, int]:
        """Publish the policies that have learned since they were published last; their new versions.

        Raises EngineError where a backend publishes nothing, or something else.
        """
        began = time.perf_counter()
        new = {alias: version for alias, version in learned.items() if version != self._versions[alias]}
        for alias, version in new.items():
            refuse_unpublished(alias, await self._backend.publish(alias), version)
            self._versions[alias] = version
        self.seconds = time.perf_counter() - began
        return new


def refuse_unpublished(policy: str, published: int, learned: int) -> None:
    """Raises EngineError where publishing did not bring the engine to the learner's version."""
    if published != learned:
        raise EngineError(
            f"Publishing the policy '{policy}' left its engine at weight version {published}, and its learner has "
            f"version {learned}: the engine does not sample from what was trained. The run was stopped; the last "
            "checkpoint is good. Look at what the backend's publish does."
        )
