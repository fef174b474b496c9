"""Finding stop strings in text that grows token by token, without decoding the whole text at every token."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from agentlightning.types.call import Int32Array

_UNFINISHED = "�"
"""What a token decodes to that is only a part of a character."""


class StopStrings:
    """Looks for stop strings at the end of responses. Special tokens count as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def find(self, response_ids: Int32Array, stop: tuple[str, ...]) -> str | None:
        """The stop string that the last token completed, if any (the one that begins first)."""
        if not self._may_complete(int(response_ids[-1]), stop):
            return None
        # Every token adds at least one byte, so the string begins at most so many tokens ago. One more, because some
        # tokenizers drop a leading space of the first token they decode.
        window = max(len(s.encode()) for s in stop) + 1
        text = self._decode(response_ids[-window:].tolist())
        found = [(text.find(s), s) for s in stop if s in text]
        return min(found)[1] if found else None

    def _may_complete(self, token: int, stop: tuple[str, ...]) -> bool:
        """Whether a stop string can end inside the token: it holds the string's last character, or part of one."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._decode([token])
        return _UNFINISHED in piece or any(s[-1] in piece or s[-1].isspace() for s in stop)

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str), type(text)
        return text
