"""What a prompt optimiser may spend, and has spent. A piece of work begins only if the rest of the budget covers it."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentlightning.arguments import explained_class
from agentlightning.errors import ConfigError


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What tokens cost, per million, in any currency. Agents' tokens count as far as their provider tells them."""

    critic_input: float = 0.0
    """The price of tokens that the critic reads."""
    critic_output: float = 0.0
    """The price of tokens that the critic writes."""
    agent_input: float = 0.0
    """The price of tokens in the agents' prompts."""
    agent_output: float = 0.0
    """The price of tokens in the agents' answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The limits; None is no limit. A cost needs prices."""

    rollouts: int | None = None
    critic_tokens: int | None = None
    cost: float | None = None
    prices: Prices | None = None

    def __post_init__(self) -> None:
        for name in ("rollouts", "critic_tokens", "cost"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"budget_{name} must be above 0, not {value}.")
        if self.cost is not None and self.prices is None:
            raise ConfigError("A budget of cost needs prices: prices=Prices(critic_input=…, critic_output=…).")


class BudgetSpent(Exception):
    """The rest of the budget does not cover what comes next; the message says which limit."""


@dataclass(slots=True)
class Ledger:
    """Counts what is spent against a budget. What a resumed run finds in its journal or store counts again."""

    budget: Budget
    rollouts: int = 0
    critic_calls: int = 0
    critic_input: int = 0
    critic_output: int = 0
    agent_input: int = 0
    agent_output: int = 0
    why: str | None = field(default=None)
    """The limit that something ran into."""

    @property
    def critic_tokens(self) -> int:
        return self.critic_input + self.critic_output

    @property
    def cost(self) -> float | None:
        """So far; None without prices."""
        p = self.budget.prices
        if p is None:
            return None
        critic = self.critic_input * p.critic_input + self.critic_output * p.critic_output
        return (critic + self.agent_input * p.agent_input + self.agent_output * p.agent_output) / 1e6

    def admit_rollouts(self, count: int) -> None:
        """Raises BudgetSpent if so many more are not covered; else they count as spent."""
        self._refuse_if(self.budget.rollouts, self.rollouts + count, "rollouts")
        self._refuse_if(self.budget.cost, self.cost or 0.0, "cost")
        self.rollouts += count

    def admit_critic(self, tokens: int) -> None:
        """Raises BudgetSpent if a call of about so many tokens is not covered."""
        self._refuse_if(self.budget.critic_tokens, self.critic_tokens + tokens, "critic tokens")
        self._refuse_if(self.budget.cost, self.cost or 0.0, "cost")

    def _refuse_if(self, limit: float | None, would_be: float, what: str) -> None:
        if limit is not None and would_be > limit:
            self.why = f"the budget of {limit:g} {what}"
            raise BudgetSpent(self.why)

    def words(self) -> str:
        """A sentence for people: what was spent of each budget."""
        b = self.budget
        parts = [_of(f"{self.rollouts}", b.rollouts, "rollouts"), _of(f"{self.critic_calls}", None, "critic calls")]
        parts.append(_of(f"{self.critic_tokens}", b.critic_tokens, "critic tokens"))
        if self.cost is not None:
            parts.append(_of(f"{self.cost:.4f}", b.cost, "cost"))
        return ", ".join(parts)


def _of(spent: str, limit: float | None, what: str) -> str:
    return f"{spent} {what}" if limit is None else f"{spent} of {limit:g} {what}"
