"""The metrics of every run and those of features, which stand in the features' own files."""

from __future__ import annotations

from agentlightning.algorithm.features import PARTS
from agentlightning.metrics.catalogue import GROUPS, METRICS, Catalogue

_ALL = (*METRICS, *(metric for kind in PARTS for metric in kind.metrics))
CATALOGUE = Catalogue(sorted(_ALL, key=lambda metric: GROUPS.index(metric.group)))
