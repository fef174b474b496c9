"""What all prompt optimisers can be told: the critic, the budget, how rewards are read, and what is promoted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, get_type_hints

from agentlightning.algorithm.base import Algorithm, PolicySpec
from agentlightning.algorithm.hints import OF_THE_TRAINER
from agentlightning.algorithm.prompts.budget import Budget, Prices
from agentlightning.algorithm.prompts.candidate import Candidate
from agentlightning.algorithm.prompts.critic import ClientCritic, CriticClient, HttpCritic
from agentlightning.arguments import GivenByName, check_address, check_kinds
from agentlightning.backend import ModelSpec
from agentlightning.errors import ConfigError
from agentlightning.types import Demonstrations, PromptTemplate, RolloutConfig


def held_out(tasks: int) -> int:
    """How many of so many training tasks are set apart for validation where none are given."""
    return tasks // 2


@dataclass
class PromptSettings(GivenByName, Algorithm):
    """The common part of `APO` and `GEPA`. They tune every `PromptTemplate` among the resources."""

    _others = OF_THE_TRAINER

    async_openai_client: Any = None
    """The critic, as an async OpenAI client; or give `critic_url`. To choose `Demonstrations` takes none."""
    _: KW_ONLY
    model: str | None = None
    """A model to serve to the agent from here, as it is; None if the agent brings its own, or gets an endpoint."""
    critic_url: str | None = None
    """The critic's OpenAI-compatible base URL, for example https://api.openai.com/v1, or that of `agl serve`."""
    critic_key: str | None = field(default=None, repr=False)
    """The API key for it."""
    critic_timeout: float = 120.0
    """Seconds to wait for one answer."""
    critic_max_tokens: int = 2048
    """The most tokens of one answer."""
    budget_rollouts: int | None = None
    """The most rollouts of a run; None is no limit."""
    budget_critic_tokens: int | None = None
    """The most tokens to and from the critic."""
    budget_cost: float | None = None
    """The highest cost of a run, in the currency of `prices`."""
    prices: Prices | None = None
    """What tokens cost, per million."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """The lowest and the highest reward there can be."""
    significance: float = 0.05
    """How likely a run may be to promote any candidate that is no better than what it replaces."""
    max_copied_words: int | None = 12
    """An edit may repeat so many words in a row of what the agent was shown; None: any number."""
    seed: int = 0
    """Decides which tasks are drawn."""
    rollout_batch_timeout: float | None = None
    """Seconds for one rollout; None is an hour."""
    rollout_config: RolloutConfig = field(default_factory=RolloutConfig)
    """Timeouts and retries of each rollout."""

    keeps_journal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_kinds(type(self).__name__, vars(self), get_type_hints(type(self)))
        if self.async_openai_client is not None and self.critic_url is not None:
            raise ConfigError("Give the critic as async_openai_client or as critic_url, not both.")
        if self.critic_url is not None:
            check_address("critic_url", self.critic_url)
        low, high = self.reward_range
        if not low < high:
            raise ConfigError(f"reward_range={self.reward_range}: the first number must be below the second.")
        if not 0 < self.significance < 1:
            raise ConfigError(f"significance must be between 0 and 1, not {self.significance}.")
        self._promoted: dict[str, PromptTemplate] | None = None
        self.candidates: dict[str, Candidate] = {}
        """All that were run, by key."""
        _ = self.budget

    @property
    def policy(self) -> PolicySpec | None:
        return None if self.model is None else PolicySpec(ModelSpec(model=self.model))

    async def search(self, run: Any) -> None:
        """Search in `run`, a `PromptRun`, until the last round or the end of the budget. Raises Stopped."""
        raise NotImplementedError

    def least_rollouts(self, train: int, val: int) -> int:
        """The rollouts needed to measure the first prompt and try one candidate, with so many tasks."""
        raise NotImplementedError

    def comparisons(self) -> int:
        """How often a candidate may be compared with the incumbent in a run, those counted that it was chosen from."""
        raise NotImplementedError

    def require_rollouts(self, train: int, val: int) -> None:
        """Raises ConfigError for a budget that ends before any candidate is measured."""
        least = self.least_rollouts(train, val)
        if self.budget_rollouts is not None and self.budget_rollouts < least:
            raise ConfigError(
                f"budget_rollouts={self.budget_rollouts} is too small: to measure the first prompt and try one "
                f"candidate takes {least}. Give more, or a smaller val_batch_size."
            )

    @property
    def budget(self) -> Budget:
        return Budget(
            rollouts=self.budget_rollouts,
            critic_tokens=self.budget_critic_tokens,
            cost=self.budget_cost,
            prices=self.prices,
        )

    @property
    def width(self) -> float:
        """The largest possible difference of two rewards."""
        return self.reward_range[1] - self.reward_range[0]

    @property
    def config(self) -> RolloutConfig:
        """The configuration of each rollout, with `rollout_batch_timeout` as its time limit."""
        if self.rollout_batch_timeout is None:
            return self.rollout_config
        return self.rollout_config.model_copy(update={"timeout_seconds": self.rollout_batch_timeout})

    def make_critic(self) -> CriticClient:
        if self.critic_url is not None:
            return HttpCritic(self.critic_url, self.critic_key)
        return ClientCritic(self.async_openai_client)

    def require_critic(self, templates: Mapping[str, PromptTemplate]) -> None:
        """Raises ConfigError where there is a text to write, and no critic who writes it."""
        texts = [name for name, t in templates.items() if not isinstance(t, Demonstrations)]
        if texts and self.async_openai_client is None and self.critic_url is None:
            name = type(self).__name__
            raise ConfigError(
                f"{name} needs a critic to write {', '.join(texts)}: {name}(AsyncOpenAI()), or "
                f"{name}(critic_url='https://…/v1', critic_key=…). Demonstrations alone need none."
            )

    def keep(self, candidates: dict[str, Candidate], best: dict[str, PromptTemplate]) -> None:
        """Keeps the results of a run: all candidates, and the best prompts."""
        self.candidates, self._promoted = candidates, best

    def get_best_prompts(self) -> dict[str, PromptTemplate]:
        """The templates of the best candidate that was promoted, by name; before any was, those the run began with.

        Raises ConfigError before a run.
        """
        if self._promoted is None:
            raise ConfigError("There is no best prompt before a run: Trainer(algorithm=…).fit(agent, tasks) first.")
        return dict(self._promoted)

    def get_best_prompt(self) -> PromptTemplate:
        """The one template that was tuned. Raises ConfigError where several were: see `get_best_prompts`."""
        found = self.get_best_prompts()
        if len(found) > 1:
            raise ConfigError(f"Several templates were tuned ({', '.join(found)}): use get_best_prompts().")
        return next(iter(found.values()))
