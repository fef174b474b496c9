"""A candidate: texts for the templates that are tuned. What it may not lose, and how it differs from another. Pure."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agentlightning.types import NamedResources, PromptTemplate

LONGEST_GROWTH = 8000
"""Characters that an edit may add; more is a critic that copies or rambles."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One version of all templates that are tuned, by name. Equal texts are the same candidate."""

    texts: tuple[tuple[str, str], ...]
    parent: str | None = field(default=None, compare=False)
    """The key of the candidate it was made from."""

    @classmethod
    def of(cls, texts: Mapping[str, str], parent: str | None = None) -> Candidate:
        return cls(tuple(sorted(texts.items())), parent)

    @property
    def key(self) -> str:
        """Names the texts, whoever made them."""
        return hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()[:10]

    @property
    def by_name(self) -> dict[str, str]:
        return dict(self.texts)

    def edited(self, name: str, text: str) -> Candidate:
        """The candidate with another text for one template."""
        return Candidate.of({**self.by_name, name: text}, parent=self.key)

    def resources(self, base: Mapping[str, PromptTemplate]) -> dict[str, PromptTemplate]:
        """The templates with these texts, otherwise as they were given."""
        return {name: base[name].model_copy(update={"template": text}) for name, text in self.texts}


def templates_in(resources: NamedResources) -> dict[str, PromptTemplate]:
    """The templates among the resources: what a prompt optimiser tunes."""
    return {name: r for name, r in resources.items() if isinstance(r, PromptTemplate)}


def placeholders(template: PromptTemplate, text: str | None = None) -> frozenset[str]:
    """What is filled in when the template is formatted, as it is written there; `text` instead of its own, if given.

    Raises ValueError for a text that cannot be read as a template.
    """
    text = template.template if text is None else text
    if template.literal:
        return frozenset()
    if template.engine == "f-string":
        return frozenset(name for _, name, _, _ in string.Formatter().parse(text) if name is not None)
    if text.count("{{") != text.count("}}"):
        raise ValueError("unbalanced {{ }}")
    return frozenset(found.strip() for found in re.findall(r"\{\{-?(.*?)-?\}\}", text, flags=re.DOTALL)) | frozenset(
        found.strip() for found in re.findall(r"\{%-?(.*?)-?%\}", text, flags=re.DOTALL)
    )


def flaw(
    template: PromptTemplate, before: str, after: str, foreign: Iterable[str] = (), max_copied_words: int | None = None
) -> str | None:
    """Why an edit of a template must not be run; None if it may.

    `foreign` holds texts that the agent met (tasks, tool results, answers), which are not to be trusted: an edit that
    repeats more than `max_copied_words` words of them in a row carries them into the prompt.
    """
    if not after.strip():
        return "the template is empty"
    if after.strip() == before.strip():
        return "nothing is changed"
    if len(after) > len(before) + LONGEST_GROWTH:
        return f"the template grew by {len(after) - len(before)} characters"
    try:
        lost = placeholders(template, before) - placeholders(template, after)
        added = placeholders(template, after) - placeholders(template, before)
    except ValueError as error:
        return f"it is no template any more: {error}"
    if lost or added:
        what = "lost" if lost else "has a new"
        return f"it {what} placeholder {', '.join('{' + name + '}' for name in sorted(lost or added))}"
    if max_copied_words is not None and (copied := _copied(before, after, foreign, max_copied_words + 1)):
        return f"it repeats what the agent was shown: “{copied}”"
    return None


def _copied(before: str, after: str, foreign: Iterable[str], length: int) -> str | None:
    """The first `length` words in a row that came from `foreign` and were not there before."""
    known = _runs(before, length)
    shown = set[tuple[str, ...]]().union(*(_runs(text, length) for text in foreign))
    found = next((run for run in _runs(after, length) if run in shown and run not in known), None)
    return None if found is None else " ".join(found)


def _runs(text: str, length: int) -> dict[tuple[str, ...], None]:
    words = re.findall(r"\w+", text.lower())
    return dict.fromkeys(tuple(words[at : at + length]) for at in range(len(words) - length + 1))


def difference(before: Candidate, after: Candidate) -> str:
    """The changed lines, as `diff -u` shows them."""
    old, new = before.by_name, after.by_name
    parts: Sequence[Iterable[str]] = [
        difflib.unified_diff(old[name].splitlines(), new[name].splitlines(), f"{name} (before)", name, lineterm="", n=1)
        for name in new
        if old[name] != new[name]
    ]
    return "\n".join(line for part in parts for line in part)
