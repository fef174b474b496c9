"""The real Ray: what its pages call the processes of a run. `make test-ray`."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from agentlightning.backend import ModelSpec, make_backend
from agentlightning.backend.ray.cluster import Need, reserve
from agentlightning.backend.ray.options import parse_options

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is tested by `make test-ray`, which installs it"),
]


async def test_actors_and_what_they_take_up_are_named_after_the_run(tmp_path: Path) -> None:
    import ray  # pyright: ignore[reportMissingImports]
    from ray.util import placement_group_table  # pyright: ignore[reportMissingImports]

    options = {"cpus_per_rank": 0.5, "cpus_per_engine": 0.5}
    spec = ModelSpec(model="calc", max_context=128, backend_options=options, folder=str(tmp_path / "mail"))
    backend = make_backend("ray", spec)
    await backend.start()
    try:
        others = await reserve([Need("runner", 1, {"CPU": 0.1})], parse_options(options), "PACK", "mail")
        groups = [group["name"] for group in placement_group_table().values() if group["state"] == "CREATED"]
        assert len(groups) == 2
        assert all(name.startswith("mail-") for name in groups), groups
        await others.give_back()
        hosts = backend._hosts.values()  # pyright: ignore
        names = {ray.get(host.actor.__ray_call__.remote(repr)) for host in hosts}
        assert names == {"learner rank 0 of mail", "engine 0 of mail"}
    finally:
        await backend.close()
