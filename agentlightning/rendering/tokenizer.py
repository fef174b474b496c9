"""A tokenizer read from a model directory, with the few methods the renderers need. Not a wrapper of transformers'
classes: importing those imports torch, which a gateway has no use for.

The ids are those of `tokenizer.json`. Directories without one (old SentencePiece or tiktoken models) go through
transformers' AutoTokenizer after all.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from agentlightning.errors import ModelError
from agentlightning.reading import read_object, read_text
from agentlightning.rendering.control import SEAM
from agentlightning.tokenizer_growth import panics_named, refuse_growth, refuse_slowness, token_ids

_TEMPLATE_FILE = "chat_template.jinja"
_CONFIG_FILE = "tokenizer_config.json"
_LONG = 16 * 1024
"""Characters."""
_BRIEF = 64
"""Characters of texts whose tokens are remembered: the parsers look for the same headers in every response."""
_REMEMBERED = 1024
"""Such texts."""


class FileTokenizer:
    """`tokenizer.json`, the special tokens and the chat template of a model directory.

    It offers no character offsets on purpose: the renderers then skip the per-token bookkeeping nobody here reads.
    """

    def __init__(self, directory: Path, name_or_path: str) -> None:
        from tokenizers import Tokenizer

        self.name_or_path = name_or_path
        self._directory = directory
        characters = refuse_growth(directory)
        self._file = directory / "tokenizer.json"
        with panics_named(self._file):
            self._tokenizer = Tokenizer.from_file(str(self._file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config: dict[str, Any] = read_json(directory / _CONFIG_FILE)
        self.eos_token_id = self._special_id("eos_token")
        self.unk_token_id = self._special_id("unk_token")
        self._brief = lru_cache(_REMEMBERED)(self._ids)
        refuse_slowness(lambda text: self.decode(self._ids(text, False)), characters, self._file)

    def encode(self, text: str, *, add_special_tokens: bool = False, **_: Any) -> list[int]:
        if SEAM in text:
            return [token for piece in text.split(SEAM) for token in self.encode(piece)]
        if len(text) <= _BRIEF:
            return list(self._brief(text, add_special_tokens))
        return self._ids(text, add_special_tokens)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        with panics_named(self._file):
            if len(text) < _LONG:
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            # Encoding in batches leaves the interpreter to other threads.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False, **_: Any) -> str:
        with panics_named(self._file):
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            found = self._tokenizer.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()

    @cached_property
    def added_tokens(self) -> dict[str, bool]:
        """The texts of the tokens that were added to the vocabulary, and whether they are special."""
        return {str(t): t.special for t in self._tokenizer.get_added_tokens_decoder().values()}

    @cached_property
    def all_special_tokens(self) -> list[str]:
        return [text for text, special in self.added_tokens.items() if special]

    @property
    def template_file(self) -> str:
        """Where `chat_template` is read."""
        file = self._directory / _TEMPLATE_FILE
        return str(file) if file.is_file() else f"{self._directory / _CONFIG_FILE}, chat_template"

    @cached_property
    def chat_template(self) -> str | None:
        """The model's own template: `chat_template.jinja`, or the entry of `tokenizer_config.json`."""
        file = self._directory / _TEMPLATE_FILE
        try:
            template = read_text(file) if file.is_file() else self._config.get("chat_template")
            if isinstance(template, list):  # several named templates
                template = {entry["name"]: entry["template"] for entry in template}.get("default")
            if template is not None and not isinstance(template, str):
                raise TypeError("it is no text")
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise ModelError(
                f"The chat template ({self.template_file}) cannot be read: {error}. Save the model again."
            ) from error
        return template

    def apply_chat_template(
        self,
        messages: Any,
        *,
        tools: Any = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **template_kwargs: Any,
    ) -> Any:
        if self.chat_template is None:
            raise ModelError(
                f"{self.name_or_path} has no chat template. Add a chat_template.jinja to the model directory, or name "
                "the one that fits it as `renderer`."
            )
        special = {k: _text(v) for k, v in self._config.items() if k.endswith("_token") and v is not None}
        options = {**special, "add_generation_prompt": add_generation_prompt, **template_kwargs}
        text = _rendered(self.chat_template, messages, tools, options)
        return self.encode(text) if tokenize else text

    def _special_id(self, key: str) -> int | None:
        token = self._config.get(key)
        if token is None:
            return None
        if not isinstance(text := _text(token), str):
            raise ModelError(
                f"{self._directory / _CONFIG_FILE} has no text as its {key}. Write the token there as it is in "
                "tokenizer.json, in quotes."
            )
        return self._tokenizer.token_to_id(text)


class SeamTokenizer:
    """A tokenizer of transformers' that begins anew where a text has a seam, as `FileTokenizer` does."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *, add_special_tokens: bool = False, **_: Any) -> list[int]:
        pieces = text.split(SEAM)
        return [i for piece in pieces for i in self._tokenizer.encode(piece, add_special_tokens=add_special_tokens)]

    def apply_chat_template(
        self, messages: Any, *, tools: Any = None, tokenize: bool = True, return_dict: bool = False, **options: Any
    ) -> Any:
        template = self._tokenizer.get_chat_template(tools=tools)
        text = _rendered(template, messages, tools, {**self._tokenizer.special_tokens_map, **options})
        return self.encode(text) if tokenize else text


_OF_TOKENIZERS = ("*token*", "vocab*", "*.model", "merges.txt", "tekken*")
_NONE_THERE = "There is no tokenizer in {}. Save the model's own there, with tokenizer.save_pretrained."


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model directory or hub id. Raises `ModelError` if there is none."""
    directory = model_directory(path)
    if (directory / "tokenizer.json").is_file():
        return FileTokenizer(directory, path)
    if not any(any(directory.glob(pattern)) for pattern in _OF_TOKENIZERS):
        raise ModelError(_NONE_THERE.format(directory))
    try:
        from transformers import AutoTokenizer

        with panics_named(directory):
            tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"No tokenizer could be loaded from {directory}: {error}. The directory needs a tokenizer.json (saved by "
            "`tokenizer.save_pretrained`)."
        ) from error
    if not any((directory / file).is_file() for file in tokenizer.vocab_files_names.values()):
        raise ModelError(_NONE_THERE.format(directory))  # for some kinds of models transformers makes an empty one
    return SeamTokenizer(tokenizer)


def added_tokens(tokenizer: Any) -> dict[str, bool]:
    """The texts of the tokens that were added to a tokenizer's vocabulary, and whether they are special."""
    if isinstance(tokenizer, FileTokenizer):
        return tokenizer.added_tokens
    return {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}


def model_directory(path: str) -> Path:
    """The local directory of a model: itself, or the snapshot of a hub id (only the tokenizer's files are fetched)."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if directory.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ModelError(f"There is no model directory {path}. Check the path, or give a Hugging Face model id.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{path} is no local directory, and its tokenizer could not be fetched from the Hugging Face hub "
            f"({error}). "
            "Check the name and the network, or give the path of a model directory."
        ) from error


def stop_tokens(path: str) -> list[int]:
    """The tokens at which a model's own generation settings stop."""
    file = model_directory(path) / "generation_config.json"
    found = read_json(file).get("eos_token_id")
    return [] if found is None else token_ids(found, f"eos_token_id in {file}")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    if not file.exists():
        return {}
    try:
        return read_object(file)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as an object of JSON: {error}. Save the model again.") from error


def _rendered(template: str, messages: Any, tools: Any, options: dict[str, Any]) -> str:
    from agentlightning.rendering.sandbox import render  # which needs jinja2 and transformers

    return render(template, messages, tools=tools, **options)


def _text(token: Any) -> Any:
    """Special tokens are written as a string, or as an object with the string under `content`."""
    return token.get("content") if isinstance(token, dict) else token
