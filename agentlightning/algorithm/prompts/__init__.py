"""The common ground of prompt optimisers: candidates, their evaluation, the critic, the budget, and the incumbent."""

from agentlightning.algorithm.prompts.budget import Budget, Prices
from agentlightning.algorithm.prompts.candidate import Candidate
from agentlightning.algorithm.prompts.settings import PromptSettings

__all__ = ["Budget", "Candidate", "Prices", "PromptSettings"]
