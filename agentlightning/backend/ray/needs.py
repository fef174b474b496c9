"""Whether what a run needs has room on a cluster, and in words why not. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Resources = Mapping[str, float]
"""By Ray's names: CPU, GPU."""


@dataclass(frozen=True, slots=True)
class Need:
    """So many processes of a kind."""

    what: str
    count: int
    each: Resources

    def bundles(self) -> list[dict[str, float]]:
        """A bundle of resources for each, as Ray reserves them; one that asks for nothing counts a bit."""
        each = {name: amount for name, amount in self.each.items() if amount} or {"CPU": 0.001}
        return [dict(each) for _ in range(self.count)]

    def __str__(self) -> str:
        return f"{self.count} × {self.what} with {amounts(self.each)}"


def fits_on(needs: Sequence[Need], machines: Sequence[Resources], *, apart: bool = False) -> bool:
    """Whether all find a place, the largest first, each on the first machine with room; `apart`: on one of its own."""
    left = [dict(machine) for machine in machines]
    bundles = [bundle for need in needs for bundle in need.bundles()]
    for bundle in sorted(bundles, key=lambda b: (-b.get("GPU", 0.0), -b.get("CPU", 0.0))):
        fits = (m for m in left if all(m.get(name, 0.0) + 1e-9 >= amount for name, amount in bundle.items()))
        machine = next(fits, None)
        if machine is None:
            return False
        for name, amount in bundle.items():
            machine[name] -= amount
        if apart:
            left.remove(machine)
    return True


def on_other_machines(one: int, bundles: Sequence[int], machines: Mapping[int, str]) -> list[int]:
    """Of some bundles, the first on each machine that a certain one is not on; `machines`: which each bundle is on."""
    found = {machines[bundle]: bundle for bundle in reversed(bundles) if machines[bundle] != machines[one]}
    return sorted(found.values())


def too_small(needs: Sequence[Need], machines: Sequence[Resources], free: Resources, *, hint: str) -> str:
    """What is needed, what is there, and what to do."""
    needed = " and ".join(str(need) for need in needs)
    there = "; ".join(amounts(machine) for machine in machines) or "none"
    count = f"{len(machines)} machine{'s' * (len(machines) != 1)}"
    return (
        f"The Ray cluster has no room for this run. It needs {needed}. "
        f"There: {count} ({there}), of which {amounts(free)} are free. {hint}"
    )


def amounts(resources: Resources) -> str:
    """CPUs and GPUs in words."""
    return ", ".join(f"{resources.get(n, 0.0):g} {n}" for n in ("CPU", "GPU") if n == "CPU" or resources.get(n)) or "0"


def lacking(bundles: Sequence[Resources], machines: Mapping[int, str], alive: Collection[str]) -> dict[str, float]:
    """What the bundles need that are on no machine that is alive; `machines`: which each bundle is on."""
    homeless = [bundle for number, bundle in enumerate(bundles) if machines.get(number, "") not in alive]
    names = sorted({name for bundle in homeless for name in bundle})
    return {name: sum(bundle.get(name, 0.0) for bundle in homeless) for name in names}


def waiting(needed: Resources, free: Resources, seconds: float) -> str:
    """What a run waits for, in words."""
    parts = [f"{counted(n, needed[n])}, {free.get(n, 0.0):g} available" for n in ("CPU", "GPU") if needed.get(n)]
    return f"Waiting for resources: needs {'; '.join(parts) or 'a machine'}, since {seconds:.0f} s."


def counted(name: str, amount: float) -> str:
    return f"{amount:g} {name}{'s' * (amount != 1)}"
