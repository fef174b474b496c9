"""The metrics of every run and those of features, which stand in the features' own files."""

from __future__ import annotations

from agentlightning.algorithm.features import PARTS
from agentlightning.metrics.catalogue import METRICS, Catalogue

CATALOGUE = Catalogue((*METRICS, *(metric for kind in PARTS for metric in kind.metrics)))
