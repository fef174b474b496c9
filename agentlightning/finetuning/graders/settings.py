"""What the owner of a server sets about graders, in a script or in the file that `AGL_GRADERS` names."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import msgspec
from pydantic import PositiveFloat, PositiveInt

from agentlightning.algorithm.records import refuse_other_kinds, refuse_out_of_bounds
from agentlightning.arguments import refuse_unknown
from agentlightning.errors import ConfigError
from agentlightning.gateway import Provider
from agentlightning.litagent.bubblewrap import Bubblewrap
from agentlightning.litagent.isolation import Container

FILE = "AGL_GRADERS"
"""The environment variable with the path of a TOML or JSON file of these settings."""
EMBEDDINGS_KEY = "AGL_EMBEDDINGS_KEY"
GraderIsolation = Literal["bubblewrap"] | Bubblewrap | Container | None


@dataclass(frozen=True, kw_only=True)
class GraderSettings:
    """What graders may use here, and what runs Python graders."""

    embeddings_model: str | None = None
    """The model whose embeddings `text_similarity` compares by `cosine`; None refuses that metric."""
    embeddings_url: str | None = None
    """The OpenAI-compatible endpoint of that model, with /v1, whose key is the environment variable
    `AGL_EMBEDDINGS_KEY`; None: where model graders ask their models."""
    models: Collection[str] | None = None
    """The models that `score_model` and `label_model` may ask, by name; None: any."""
    providers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Models of other servers that `score_model` and `label_model` may ask, by name: for each the settings of a
    `Provider`, and as `key_variable` the environment variable with its key. Its price and its limits count."""
    isolation: GraderIsolation = "bubblewrap"
    """What keeps Python graders apart from this machine. None runs them as the user that you are, with no wall around
    them: only for graders that you wrote yourself."""
    python: str = sys.executable
    """The interpreter of Python graders; its packages are those that they can import."""
    images: Mapping[str, str] = field(default_factory=dict)
    """For each `image_tag` that a Python grader may name: an interpreter. Others are refused."""
    seconds: PositiveFloat = 120.0
    """The time that a Python grader may take for one sample."""
    memory_bytes: PositiveInt = 2 * 1024**3
    """The memory of each process of a Python grader."""
    file_bytes: PositiveInt = 256 * 1024**2
    """What a Python grader may write, which is kept in memory, to each of the three folders that it can write to."""
    processes: PositiveInt = 2
    """Samples that are graded at the same time by one Python grader."""

    def __post_init__(self) -> None:
        refuse_other_kinds(self, " of graders")
        refuse_out_of_bounds(self, " of graders")
        if self.embeddings_url is not None and self.embeddings_model is None:
            raise ConfigError("embeddings_url of graders has no effect without embeddings_model.")
        images = self.images if isinstance(self.images, Mapping) else {"": None}
        if not all(isinstance(path, str) for path in images.values()):
            raise ConfigError(f"images of graders is {self.images!r}; give the path of an interpreter for each tag.")
        for name in self.providers:
            self.provider(name)
        if self.models is not None and (isinstance(self.models, str) or not isinstance(self.models, Collection)):
            raise ConfigError(f"models of graders is {self.models!r}; give a list of names.")

    def provider(self, name: str) -> Provider | None:
        """What a name among `providers` means; None for another name. Raises ConfigError for what is none."""
        given = self.providers.get(name)
        if given is None:
            return None
        rest = {key: value for key, value in given.items() if key != "key_variable"}
        refuse_unknown(f"The provider '{name}' of graders", (), rest, list(Provider.__struct_fields__), None)
        try:
            made = msgspec.convert(rest, Provider)
        except msgspec.ValidationError as error:
            raise ConfigError(f"The provider '{name}' of graders cannot be used: {error}.") from None
        if (variable := given.get("key_variable")) is None:
            return made
        return msgspec.structs.replace(made, api_key=os.environ.get(variable) or None)


def owners_settings() -> GraderSettings:
    """The settings of the file that `AGL_GRADERS` names; the defaults where it names none. Raises ConfigError."""
    path = os.environ.get(FILE)
    return read_settings(Path(path)) if path else GraderSettings()


def read_settings(file: Path) -> GraderSettings:
    """Settings by name. `isolation` is "bubblewrap", "none", or a table: `read` of a Bubblewrap, or `command` and
    `cleanup` of a Container. Raises ConfigError."""
    try:
        text = file.read_text(encoding="utf-8")
        given: dict[str, Any] = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
        refuse_unknown("The file of graders", (), given, [one.name for one in fields(GraderSettings)], None)
        if "isolation" in given:
            given["isolation"] = _isolation(given["isolation"])
        return GraderSettings(**given)
    except (OSError, ValueError, TypeError, AttributeError, ConfigError) as error:
        raise ConfigError(f"The settings of graders cannot be taken from {file}: {error}") from error


def _isolation(given: Any) -> GraderIsolation:
    if isinstance(given, Mapping):
        return Container(**given) if "command" in given else Bubblewrap(**given)
    if given not in ("bubblewrap", "none"):
        raise ValueError(f'isolation is {given!r}; it can be "bubblewrap", "none" or a table')
    return None if given == "none" else "bubblewrap"
