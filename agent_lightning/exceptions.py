"""What the client raises. All are `agentlightning.AgentLightningError`s."""

from __future__ import annotations

from agentlightning.errors import AgentLightningError, ConfigError


class ServerConnectionError(AgentLightningError):
    """The server cannot be reached, or refused."""


class DataUploadError(AgentLightningError):
    """The tasks cannot be read, or the server did not take them."""


class TrainingError(AgentLightningError):
    """The training on the server failed."""


InvalidConfigError = ConfigError
