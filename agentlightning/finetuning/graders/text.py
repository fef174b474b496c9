"""Graders that compare two texts: `string_check` and `text_similarity`, whose metrics are well-kept libraries'."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from agentlightning.errors import missing_extra
from agentlightning.finetuning.graders.base import Grader, GraderFailed, GraderFields, Grading, Score, Template
from agentlightning.finetuning.graders.model import HttpModels
from agentlightning.finetuning.graders.settings import EMBEDDINGS_KEY, GraderSettings

CHECKS: Mapping[str, Callable[[str, str], bool]] = {
    "eq": lambda text, reference: text == reference,
    "ne": lambda text, reference: text != reference,
    "like": lambda text, reference: reference in text,
    "ilike": lambda text, reference: reference.casefold() in text.casefold(),
}
"""What each operation of a `string_check` says of an input and a reference."""


@dataclass(frozen=True, kw_only=True)
class StringCheck(Grader):
    """1 where two texts are equal, or one contains the other, else 0."""

    type: ClassVar[str] = "string_check"
    input: Template
    reference: Template
    operation: str

    @classmethod
    def read(cls, fields: GraderFields, name: str, settings: GraderSettings) -> StringCheck:
        operation = fields.one_of("operation", list(CHECKS), {"neq": "ne"})  # as some guides write it
        input, reference = fields.template("input"), fields.template("reference")
        fields.end()
        return cls(name=name, given=fields.given, input=input, reference=reference, operation=operation)

    async def score(self, grading: Grading) -> Score:
        return Score(float(CHECKS[self.operation](grading.fill(self.input), grading.fill(self.reference))))


QUADRATIC = ("fuzzy_match", "meteor", "rouge_l")
"""Metrics that compare every word, or character, with every other."""
MOST_WORK = 10**9
"""The product of the characters that these compare: some seconds of work."""


@dataclass(frozen=True, kw_only=True)
class TextSimilarity(Grader):
    """How alike two texts are, from 0 to 1."""

    type: ClassVar[str] = "text_similarity"
    input: Template
    reference: Template
    metric: str
    settings: GraderSettings

    @classmethod
    def read(cls, fields: GraderFields, name: str, settings: GraderSettings) -> TextSimilarity:
        metric = fields.one_of("evaluation_metric", ["cosine", *METRICS])
        if metric == "cosine" and settings.embeddings_model is None:
            raise fields.refused(
                "evaluation_metric",
                "is 'cosine', which compares embeddings, and no embeddings model is set "
                f"(GraderSettings.embeddings_model). Without one there are {', '.join(METRICS)}.",
            )
        if metric != "cosine":
            METRICS[metric]("a", "a")  # a missing library is reported now
        input, reference = fields.template("input"), fields.template("reference")
        fields.end("pass_threshold")
        common = {"name": name, "given": fields.given, "input": input, "reference": reference}
        return cls(**common, metric=metric, settings=settings)

    async def score(self, grading: Grading) -> Score:
        text, reference = grading.fill(self.input), grading.fill(self.reference)
        if self.metric != "cosine":
            if self.metric in QUADRATIC and len(text) * len(reference) > MOST_WORK:
                sizes = f"{len(text):,} and {len(reference):,}"
                raise GraderFailed("other_error", f"{self.metric} compares no texts of {sizes} characters: too long.")
            found = await asyncio.to_thread(METRICS[self.metric], text, reference)
            return Score(min(1.0, max(0.0, float(found))))
        one, other = await self._vectors(grading, [text, reference])
        return Score(_cosine(one, other), model=self.settings.embeddings_model)

    async def _vectors(self, grading: Grading, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        url, model = self.settings.embeddings_url, self.settings.embeddings_model
        own = HttpModels(url, os.environ.get(EMBEDDINGS_KEY)) if url else None
        models = own or grading.models
        if models is None or model is None:
            raise GraderFailed("model_grader_server_error", "There is no model that makes embeddings.")
        try:
            return await models.embed(model, texts)
        except Exception as error:  # whatever stands between us and the model
            raise GraderFailed("model_grader_server_error", f"{type(error).__name__}: {error}") from error
        finally:
            if own is not None:
                await own.close()


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    length = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / length if length else 0.0


def _library(import_it: Callable[[], Any]) -> Callable[[], Any]:
    """A library of the extra `finetuning`, imported when first asked for."""

    @cache
    def imported() -> Any:
        try:
            return import_it()
        except ImportError as error:
            raise missing_extra("finetuning", error.name or "rouge-score") from error

    return imported


@_library
def _rapidfuzz() -> Any:
    from rapidfuzz import fuzz, utils

    return lambda text, reference: fuzz.WRatio(text, reference, processor=utils.default_process)


@_library
def _sacrebleu() -> Any:
    import sacrebleu

    return sacrebleu


@_library
def _words() -> Any:
    """The tokenizer of the WMT metrics, in small letters."""
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    tokenizer = Tokenizer13a()
    return lambda text: tokenizer(text).split()


@_library
def _gleu() -> Any:
    from nltk.translate.gleu_score import sentence_gleu

    return sentence_gleu


@_library
def _meteor() -> Any:
    from nltk.translate.meteor_score import single_meteor_score

    return single_meteor_score


class _NoSynonyms:
    """In place of WordNet, which nltk does not come with: words match by their form and by their stem."""

    def synsets(self, word: str) -> list[Any]:
        return []


@_library
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer


@_library
def _rouge_words() -> Any:
    """The words of the ROUGE metrics."""
    from rouge_score.tokenizers import DefaultTokenizer

    return DefaultTokenizer(use_stemmer=False).tokenize


@cache
def _scorer(kind: str) -> Any:
    return _rouge_scorer()([kind])


def _rouge(kind: str) -> Callable[[str, str], float]:
    return lambda text, reference: _scorer(kind).score(reference, text)[kind].fmeasure


def _rouge_l(text: str, reference: str) -> float:
    """As rouge-score's, whose table of the longest common subsequence takes gigabytes for some ten thousand words."""
    from rapidfuzz.distance import LCSseq

    one, other = _rouge_words()(text), _rouge_words()(reference)
    return 2 * LCSseq.similarity(one, other) / (len(one) + len(other)) if one and other else 0.0


METRICS: Mapping[str, Callable[[str, str], float]] = {
    "fuzzy_match": lambda text, reference: _rapidfuzz()(text, reference) / 100,
    "bleu": lambda text, reference: _sacrebleu().sentence_bleu(text, [reference]).score / 100,
    "gleu": lambda text, reference: _gleu()([_words()(reference)], _words()(text)),
    "meteor": lambda text, reference: _meteor()(_words()(reference), _words()(text), wordnet=_NoSynonyms()),
    **{f"rouge_{n}": _rouge(f"rouge{n}") for n in range(1, 6)},
    "rouge_l": _rouge_l,
}
"""Each metric of an input and a reference, from 0 to 1: `WRatio` of rapidfuzz, sentence BLEU of sacrebleu, GLEU and
METEOR of nltk, the F-measure of rouge-score, over its words."""
