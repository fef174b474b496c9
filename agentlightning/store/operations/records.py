"""All that an algorithm reads of rollouts, in one transaction: the rollouts, their calls, and what they earned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import and_, or_, select

from agentlightning.store.database.schema import rollouts as rollouts_table, spans as spans_table
from agentlightning.store.database.transaction import IDS_PER_QUERY, Transaction
from agentlightning.store.operations import calls, rollouts
from agentlightning.store.operations.spans import SPAN_COLUMNS, to_span, whole
from agentlightning.types import AttemptedRollout, Rollout, RolloutRecord, Span
from agentlightning.types.names import REWARD, TRIPLET
from agentlightning.types.reward import AGENTOPS_OUTPUTS


class RecordTable(NamedTuple):
    """What `RolloutRecord`s are made from; smaller, for a wire."""

    rollouts: list[AttemptedRollout | Rollout]
    spans: list[Span]
    calls: calls.CallTable


def fetch(tx: Transaction, rollout_ids: Sequence[str]) -> RecordTable:
    """Those of the rollouts that exist, in the order asked for. Four queries, however many they are."""
    found = rollouts.read_many(tx, list(dict.fromkeys(rollout_ids)))
    return RecordTable(list(found.values()), _telling_spans(tx, list(found)), calls.fetch(tx, list(found), True))


def _telling_spans(tx: Transaction, rollout_ids: Sequence[str]) -> list[Span]:
    """Spans of latest attempts that carry a reward, a triplet, or the refusal of a request, in their order."""
    t = spans_table.c
    patterns = (f'"{REWARD}.', '"error.type":"refused"')
    outputs = or_(*(t.attributes.contains(f'"{key}"', autoescape=True) for key in AGENTOPS_OUTPUTS))
    tells = or_(
        t.name.in_((TRIPLET, REWARD)),
        *(t.attributes.contains(words, autoescape=True) for words in patterns),
        and_(outputs, t.attributes.contains("reward")),
    )
    statement = (
        select(*SPAN_COLUMNS)
        .join_from(spans_table, rollouts_table, rollouts_table.c.latest_attempt_id == t.attempt_id)
        .order_by(t.sequence_id, t.seq)
    )
    found: list[Span] = []
    for start in range(0, len(rollout_ids), IDS_PER_QUERY):
        chosen = t.rollout_id.in_(rollout_ids[start : start + IDS_PER_QUERY])
        found += [to_span(row) for row in whole(tx, tx.select(statement.where(chosen, tells)))]
    return found


def assemble(table: RecordTable) -> list[RolloutRecord]:
    spans_of: defaultdict[str, list[Span]] = defaultdict(list)
    for span in table.spans:
        spans_of[span.rollout_id].append(span)
    calls_of = calls.assemble(table.calls, [rollout.rollout_id for rollout in table.rollouts])
    return [RolloutRecord(r, calls_of[r.rollout_id], spans_of[r.rollout_id]) for r in table.rollouts]
