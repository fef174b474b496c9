"""What the Ray backend says before there is a cluster: room, options, a package that is not there."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from agentlightning.backend import check_backend
from agentlightning.backend.ray.carry import Packed, pack, unpack
from agentlightning.backend.ray.cluster import (
    Need,
    Placement,
    connected,
    fits_on,
    lacking,
    on_other_machines,
    too_small,
    waiting,
)
from agentlightning.backend.ray.elastic import LearnerPlaces, Look
from agentlightning.backend.ray.options import RayOptions, parse_options
from agentlightning.errors import ConfigError, ModelError

RANKS, ENGINE = Need("learner rank", 2, {"CPU": 1, "GPU": 1}), Need("engine", 1, {"CPU": 2})


@pytest.mark.parametrize(
    ("machines", "apart", "fits"),
    [
        ([{"CPU": 4, "GPU": 2}], False, True),
        ([{"CPU": 4, "GPU": 1}], False, False),
        ([{"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 2}], True, True),
        ([{"CPU": 1, "GPU": 1}, {"CPU": 3, "GPU": 1}], True, False),
        ([{"CPU": 3, "GPU": 1}, {"CPU": 1, "GPU": 1}], False, True),
        ([{"CPU": 2, "GPU": 1}, {"CPU": 1, "GPU": 1}], False, False),
        ([], False, False),
    ],
)
def test_what_finds_a_place(machines: list[dict[str, float]], apart: bool, fits: bool) -> None:
    assert fits_on([RANKS, ENGINE], machines, apart=apart) is fits


def test_what_asks_for_nothing_counts_a_bit() -> None:
    assert Need("runner", 3, {"CPU": 0}).bundles() == [{"CPU": 0.001}] * 3


def test_too_small_says_what_it_needs_and_what_is_there() -> None:
    words = too_small([RANKS, ENGINE], [{"CPU": 2}, {"CPU": 8, "GPU": 1}], {"CPU": 3, "GPU": 1}, hint="Wait.")
    assert "2 × learner rank with 1 CPU, 1 GPU and 1 × engine with 2 CPU" in words
    assert "2 machines (2 CPU; 8 CPU, 1 GPU), of which 3 CPU, 1 GPU are free. Wait." in words


@pytest.mark.parametrize("alive", [{"a", "b"}, {"a"}, {"b"}, set()])
def test_what_is_waited_for_after_machines_died(alive: set[str]) -> None:
    bundles = [bundle for need in (RANKS, ENGINE) for bundle in need.bundles()]
    machines = {0: "a", 1: "b", 2: "b"}
    found = lacking(bundles, machines, alive)
    assert found.get("CPU", 0) == sum({"a": 1, "b": 3}[name] for name in {"a", "b"} - alive)
    assert found.get("GPU", 0) == len({"a", "b"} - alive)


def test_waiting_says_what_is_needed_and_what_is_there() -> None:
    assert waiting({"CPU": 3}, {"CPU": 2}, 14.2) == "Waiting for resources: needs 3 CPUs, 2 available, since 14 s."
    both = waiting({"CPU": 1, "GPU": 2}, {"CPU": 4}, 5)
    assert both == "Waiting for resources: needs 1 CPU, 4 available; 2 GPUs, 0 available, since 5 s."


def test_one_bundle_on_each_other_machine() -> None:
    """Of four workers; the fifth bundle is their driver's."""
    assert on_other_machines(4, range(4), {0: "a", 1: "b", 2: "b", 3: "c", 4: "a"}) == [1, 3]
    assert on_other_machines(4, range(4), dict.fromkeys(range(5), "a")) == []


def test_options() -> None:
    check_backend("ray", {"engines": 2, "address": "auto", "placement": "SPREAD"})
    for wrong in ({"engine": 2}, {"engines": 0}, {"placement": "APART"}, {"address": "auto", "object_store_memory": 1}):
        with pytest.raises(ConfigError, match="backend_options of the ray backend"):
            check_backend("ray", wrong)
    for wrong, words in (
        ({"learner": "Verl"}, "learner can be 'own' or 'verl'"),
        ({"lerner": "verl"}, "There are: addr"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_backend("ray", wrong)
    assert RayOptions(engines=3, cpus_per_engine=2, cpus_per_rank=4).cpus(ranks=2) == 14


async def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs the package 'ray'.*\[ray\]"):
        async with connected(RayOptions(), cpus=1):
            pass


def test_files_arrive_as_they_were_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"\x00\x01\x02")
    (tmp_path / "model" / "empty").touch()
    packed = pack(tmp_path / "model")
    unpack(packed, tmp_path / "there")
    assert {p.name: p.read_bytes() for p in (tmp_path / "there").iterdir()} == {
        "weights": b"\x00\x01\x02",
        "empty": b"",
    }
    damaged = Packed({**packed.files, "weights": np.array([0, 1, 3], dtype=np.uint8)}, packed.checksums)
    with pytest.raises(ModelError, match=r"damaged on their way.*weights"):
        unpack(damaged, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_engines_are_a_number_or_as_many_as_there_is_room_for() -> None:
    options = parse_options({"engines": "auto", "cpus_per_engine": 2})
    assert options.first_engines == 1
    assert options.cpus(3) == 3 + 2
    assert parse_options({"engines": 4}).first_engines == 4
    with pytest.raises(ConfigError, match="engines can be a number or 'auto'"):
        parse_options({"engines": "many"})
    for wrong in ("automatic", 0, "4", None):
        with pytest.raises(ConfigError, match="engines"):
            parse_options({"engines": wrong})


def test_a_look_says_what_is_waited_for_and_where_a_bundle_is() -> None:
    placement = Placement(SimpleNamespace(id=SimpleNamespace(hex=lambda: "ours")))
    here = {"state": "CREATED", "bundles_to_node_id": {0: "first", 1: "second"}}
    seen = Look(frozenset(), {}, {"ours": here, "gone": {"state": "REMOVED", "bundles_to_node_id": {}}})
    assert (seen.machine_of(placement, 0), seen.machine_of(placement, 1)) == ("first", "second")
    assert not seen.waited_for
    seen = Look(frozenset(), {}, {"ours": {**here, "state": "RESCHEDULING"}})
    assert seen.machine_of(placement, 0) is None
    assert seen.waited_for
    assert Look(frozenset(), {}, {}).machine_of(placement, 0) is None


def test_a_learner_leaves_draining_machines_once_all_of_it_can_move(caplog: pytest.LogCaptureFixture) -> None:
    def placed(name: str, *bundles: float) -> Placement:
        each = [{"CPU": cpus} for cpus in bundles]
        return Placement(SimpleNamespace(id=SimpleNamespace(hex=lambda: name), bundle_specs=each))

    def look(draining: set[str], free: dict[str, float]) -> Look:
        groups = {
            "ours": {"state": "CREATED", "bundles_to_node_id": {0: "a", 1: "b", 2: "b"}},
            "added": {"state": "CREATED", "bundles_to_node_id": {0: "b"}},
        }
        return Look(draining, {node: {"CPU": cpus} for node, cpus in free.items() if node not in draining}, groups)

    ours, added = placed("ours", 1.0, 1.0, 1.0), placed("added", 1.0)
    needs = [Need("learner rank", 2, {"CPU": 1.0}), Need("engine", 1, {"CPU": 1.0})]
    places = LearnerPlaces(ours, ["learner rank 0", "learner rank 1"], needs)
    found: list[bool | None] = []
    for draining, free, others in (
        (set[str](), {"a": 0.0, "b": 0.0}, []),
        ({"a"}, {"b": 0.0}, []),
        ({"a"}, {"b": 0.0}, [added]),
        ({"a"}, {"b": 1.0}, []),
        ({"a", "b"}, {"c": 2.0}, [added]),
        ({"a", "b"}, {"c": 2.0, "d": 1.0}, []),
        (set[str](), {"a": 0.0, "b": 0.0}, []),
    ):
        places.follow(look(draining, free), others)
        found.append(places.drain and places.drain.can_move)
    assert found == [None, False, True, True, False, True, None]
    assert caplog.text.count("The machine of learner rank 0 is draining. The run saves each step") == 1
    assert caplog.text.count("The machine of learner rank 0 is draining. The run starts again on other") == 1
    assert "The machines of learner rank 0 and learner rank 1 are draining. The run saves each step" in caplog.text
