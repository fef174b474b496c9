"""A league: the policy plays against frozen earlier selves, drawn by a schedule (self-play).

`League` is the setting; `Opponents` is the pool of a run: who is in it, how often the policy has won against each, who
is drawn next, and when the policy as it is joins. A member is a LoRA adapter that is sampled and never trained; the
first opponent is the model that the run began with. Whom a rollout plays stands in its metadata: `opponent`, the model
to ask; `opponent_name`, who that is (start, step-10, …); `seat`; and `pool`, the models of all earlier selves.

Prioritised fictitious self-play weighs an opponent by how often the policy wins against it: AlphaStar (Vinyals et al.,
Nature 575, 2019, supplement, "PFSP"): f_hard(p) = (1 − p)² draws those that are hard to beat, f_var(p) = p (1 − p)
those of the same strength. With `latest` the policy plays its newest self only, which is plain self-play.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.part import Part, RunHooks, RunScope
from agentlightning.algorithm.records import ByName, value_of
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.arguments import can_be, explained_class
from agentlightning.backend import Backend, TakesUp
from agentlightning.errors import ConfigError
from agentlightning.metrics.catalogue import REWARD, Metric
from agentlightning.types.arrays import Array, np

if TYPE_CHECKING:
    from agentlightning.algorithm.episode import Sampled

PLAYER, START = "player", "start"
KEPT = 0.9
"""Of what is known of an opponent, when a further group has played it."""

Draw = Callable[[Array], Array]
"""wins_M → weights_M: how often the policy wins against each member, oldest first (0.5 where nobody knows yet), and how
often each is drawn."""


def latest(wins_M: Array) -> Array:
    """Draws only the newest member."""
    weights_M = np.zeros(len(wins_M))
    weights_M[-1] = 1.0
    return weights_M


def uniform(wins_M: Array) -> Array:
    """Draws all members with equal probability (fictitious self-play)."""
    return np.ones(len(wins_M))


def pfsp(wins_M: Array) -> Array:
    """Prefers members that are hard to beat, by (1 − p)² where p is the policy's win rate."""
    return (1.0 - wins_M) ** 2 + 1e-3


def pfsp_even(wins_M: Array) -> Array:
    """Prefers members of the same strength, by p (1 − p) where p is the policy's win rate."""
    return wins_M * (1.0 - wins_M) + 1e-3


DRAWS: dict[str, Draw] = {"latest": latest, "uniform": uniform, "pfsp": pfsp, "pfsp_even": pfsp_even}


@explained_class
@dataclass(frozen=True, kw_only=True)
class League(ByName, Part):
    """How a policy plays against its earlier selves: `GRPO(…, league="pfsp")`, or `league=agl.League(…)`."""

    metrics = (
        Metric(
            "opponent/…/win_rate",
            "Wins against …",
            REWARD,
            "share",
            "How often the step's rollouts won against this member of the league; a draw counts one half.",
        ),
    )

    draw: str | Draw = "pfsp"
    """Whom to play: latest, uniform, pfsp, pfsp_even, or a function of your own (win rates, oldest member first)."""
    size: int = 4
    """Earlier selves that are kept, besides the model that the run began with. When there are more, the one that the
    policy beats most surely leaves; the newest stays."""
    every: int = 5
    """Steps between two joinings."""
    even: float = 0.0
    """The reward of a draw: a rollout is won above it and lost below it."""
    seats: int = 1
    """How many sides of the game there are to take: each group gets one at random, a number from 0."""

    def __post_init__(self) -> None:
        if isinstance(self.draw, str) and self.draw not in DRAWS:
            raise ConfigError(f"draw is {self.draw!r}; {can_be(self.draw, DRAWS, 'a function')}")
        for name in ("size", "every", "seats"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} of a League is {value!r}; it must be a whole number of at least 1.")

    @property
    def members(self) -> list[str]:
        """The aliases of its places."""
        return [f"member-{n}" for n in range(1, self.size + 1)]

    @property
    def weigh(self) -> Draw:
        return DRAWS[self.draw] if isinstance(self.draw, str) else self.draw

    @classmethod
    def of(cls, settings: TrainingSettings) -> League | None:
        return as_league(value_of(settings, "league"))

    @classmethod
    def check(cls, settings: TrainingSettings) -> None:
        s, own = settings, cls.of(settings)
        if own is not None and (len(s.adapters) != 1 or s.is_off_policy):
            raise ConfigError(
                "A league is for one policy whose steps wait for all rollouts: one of policies, quorum 1, no replay."
            )
        if own is not None and {*s.adapters, s.frozen} & {*own.members}:
            raise ConfigError(
                "The names member-1, member-2, … are those of a league's members; call the policy otherwise."
            )

    def in_run(self, run: RunScope) -> RunHooks:
        return _Matches(Opponents(self, run.settings.frozen or "", run.settings.seed), run)


def as_league(given: League | str | Mapping[str, Any] | None) -> League | None:
    """The league that a setting means: one, the name of a draw, or its settings by name."""
    if given is None:
        return None
    return League(draw=given) if isinstance(given, str) else League.read(given, "league")


@dataclass(slots=True)
class Member:
    """One opponent: the place that it has, who it is, and what is known of it."""

    alias: str
    name: str
    path: str | None
    """The path of its adapter; None: the model without an adapter."""
    wins: float = 0.5
    groups: int = 0


@dataclass
class Opponents:
    """The pool of a run; oldest member first."""

    league: League
    start: str
    """The alias of the model that the run began with."""
    seed: int = 0
    members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.members = self.members or [Member(self.start, START, None)]

    def match(self, step: int, group: int) -> dict[str, Any]:
        """Whom a group plays, and on which side, for its rollouts' metadata."""
        rng = np.random.default_rng([self.seed, step, group])
        weights_M = np.asarray(self.league.weigh(np.array([m.wins for m in self.members])), dtype=np.float64)
        if weights_M.shape != (len(self.members),) or not (np.isfinite(weights_M) & (weights_M >= 0)).all():
            raise ConfigError("A league's draw must give a finite weight of at least 0 for each member.")
        if not weights_M.any():
            raise ConfigError("A league's draw gives no member a weight above 0, so there is nobody to play.")
        drawn = self.members[rng.choice(len(self.members), p=weights_M / weights_M.sum())]
        match = {"opponent": drawn.alias, "opponent_name": drawn.name, "seat": int(rng.integers(self.league.seats))}
        return {**match, "pool": self.pool}

    @property
    def pool(self) -> list[str]:
        """The aliases of the earlier selves that are there, oldest first: drawing one for each game is to play as the
        league's average, which is what fictitious play brings to an equilibrium (Heinrich et al., ICML 2015)."""
        return [m.alias for m in self.members if m.path is not None]

    def record(self, episodes: Sequence[Episode]) -> None:
        """Take in how rollouts of a step ended."""
        for member in self.members:
            groups: dict[Any, list[float]] = {}
            for e in episodes:
                if e.rollout.metadata.get("opponent_name") == member.name and e.good and e.reward is not None:
                    groups.setdefault(e.rollout.metadata.get("group"), []).append(_won(e.reward, self.league.even))
            for won in groups.values():
                member.wins = KEPT * member.wins + (1 - KEPT) * fmean(won)
                member.groups += 1

    async def grow(self, backend: Backend, policy: str, folder: Path, step: int) -> None:
        """Adds the current policy to the league, every `every` steps."""
        if step % self.league.every:
            return
        path = folder / "league" / f"step-{step:06d}"
        await backend.learner(policy).export(str(path))
        joined = Member(self._place(), f"step-{step}", str(path))
        await _holder(backend).take_up(joined.alias, str(path))
        self.members.append(joined)

    async def return_to(self, backend: Backend, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the pool of an interrupted run."""
        self.members = [Member(**one) for one in state] or self.members
        for member in self.members:
            if member.path is not None:
                await _holder(backend).take_up(member.alias, member.path)

    @property
    def state(self) -> list[dict[str, Any]]:
        """The members of the league, to be saved in a checkpoint."""
        return [{name: getattr(m, name) for name in Member.__slots__} for m in self.members]

    def _place(self) -> str:
        """A free one, or that of the member that the policy beats most surely."""
        taken = {m.alias for m in self.members}
        free = [alias for alias in self.league.members if alias not in taken]
        if free:
            return free[0]
        selves = [m for m in self.members if m.path is not None]
        leaving = max(selves[:-1] or selves, key=lambda m: m.wins)
        self.members.remove(leaving)
        return leaving.alias


def of_opponents(episodes: Sequence[Episode], even: float) -> dict[str, float]:
    """How often a step's rollouts won, by opponent; a draw counts one half."""
    found: dict[str, list[float]] = {}
    for e in episodes:
        if (name := e.rollout.metadata.get("opponent_name")) is not None and e.good and e.reward is not None:
            found.setdefault(name, []).append(_won(e.reward, even))
    return {f"opponent/{name}/win_rate": fmean(won) for name, won in sorted(found.items())}


def _won(reward: float, even: float) -> float:
    return 0.5 if reward == even else float(reward > even)


def _holder(backend: Backend) -> TakesUp:
    if not isinstance(backend, TakesUp):
        raise ConfigError(f"{type(backend).__name__} holds no opponents, which a league needs: it has no take_up.")
    return backend


class _Matches(RunHooks):
    """What a league does in a run."""

    def __init__(self, opponents: Opponents, run: RunScope) -> None:
        self._opponents = opponents
        self._run = run

    async def load(self, state: Sequence[Mapping[str, Any]]) -> None:
        await self._opponents.return_to(self._run.backend, state)

    def state(self) -> list[dict[str, Any]]:
        return self._opponents.state

    def metadata(self, step: int, group: int) -> dict[str, Any]:
        return self._opponents.match(step, group)

    def validation_metadata(self) -> dict[str, Any]:
        return {"opponent": self._opponents.start, "seat": 0, "pool": self._opponents.pool}

    def sampled(self, groups: Sequence[tuple[int, Sequence[Episode]]]) -> None:
        self._opponents.record([e for _, episodes in groups for e in episodes])

    def measure(self, sampled: Sampled) -> dict[str, float]:
        return of_opponents([*sampled.episodes, *sampled.dropped], self._opponents.league.even)

    async def published(self, step: int, versions: Mapping[str, int], episodes: Sequence[Episode]) -> dict[str, Any]:
        run = self._run
        await self._opponents.grow(run.backend, run.policies[0], run.context.run_dir, step)
        return {}
