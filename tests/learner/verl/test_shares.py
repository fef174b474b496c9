"""Whose attention workers can share, as verl splits it by heads."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from agentlightning.errors import ConfigError
from agentlightning.learner.policy import Policy
from agentlightning.learner.verl.learner import refuse_shares
from agentlightning.learner.verl.sizes import Sizes


@pytest.mark.parametrize("share", [1, 2, 4])
def test_workers_share_heads_evenly(policy: Policy, share: int) -> None:
    """Of 4 heads, with 2 of keys and values: those are repeated where there are more workers."""
    refuse_shares(policy, Sizes(workers=4, sequence_parallel=share))


def test_heads_that_cannot_be_shared_are_refused(policy: Policy) -> None:
    with pytest.raises(ConfigError, match="3 workers cannot share the 4 attention heads, with 2 of keys"):
        refuse_shares(policy, Sizes(workers=3, sequence_parallel=3))


@pytest.mark.skipif(bool(find_spec("flash_attn") or find_spec("kernels")), reason="FlashAttention is here")
def test_on_gpus_it_is_said_what_to_install(policy: Policy) -> None:
    refuse_shares(policy, Sizes(workers=2, gpus=1.0))
    with pytest.raises(ConfigError, match="pip install flash-attn"):
        refuse_shares(policy, Sizes(workers=2, sequence_parallel=2, gpus=1.0))
