"""The real Ray: what its pages call the processes of a run. `make test-ray`."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from agentlightning.backend import ModelSpec, make_backend

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
        assert [group["name"] for group in placement_group_table().values()] == ["mail"]
        hosts = backend._hosts.values()  # pyright: ignore
        names = {ray.get(host.actor.__ray_call__.remote(repr)) for host in hosts}
        assert names == {"learner rank 0 of mail", "engine 0 of mail"}
    finally:
        await backend.close()
