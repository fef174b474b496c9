"""verl's workers as the ranks of the learner: which options choose them, and what they refuse."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest

from agentlightning.backend.base import ModelSpec
from agentlightning.backend.embedded.backend import settings_of
from agentlightning.backend.ray.backend import RayBackend, driver_settings
from agentlightning.backend.ray.options import parse_options
from agentlightning.errors import ConfigError
from agentlightning.learner.policy import load_policy
from agentlightning.learner.verl.group import start_workers
from agentlightning.learner.verl.sizes import Sizes


@pytest.mark.parametrize(
    ("given", "on_verl"),
    [({}, False), ({"learner": "own"}, False), ({"learner": "verl"}, True), ({"offload": True}, True)],
)
def test_what_only_verl_can_chooses_it(given: dict[str, Any], on_verl: bool) -> None:
    options = parse_options(given)
    assert options.on_verl == on_verl
    assert options.cpus(2) == 3 + on_verl, "and whoever drives it"


def test_what_is_verls_is_refused_of_the_own_learner() -> None:
    with pytest.raises(ConfigError, match="need learner='verl'"):
        parse_options({"learner": "own", "sequence_parallel": 2})


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({"policies": ["a", "b"], "lora_rank": 8}, {}, "leave policies out"),
        ({"critic": True}, {}, "credit='broadcast'"),
        ({"dtype": "float16"}, {}, "float32 or bfloat16"),
        ({"ranks": 3}, {"sequence_parallel": 2}, "multiple of sequence_parallel"),
    ],
)
def test_what_it_cannot_do_is_refused_with_what_to_change(
    settings: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        RayBackend(ModelSpec(model="calc", backend_options={"learner": "verl", **options}, **settings))
    assert str(error.value).startswith("verl's workers ")


def test_the_driver_computes_on_the_cpu_and_is_no_rank() -> None:
    spec = ModelSpec(model="calc", ranks=4, device="cuda", dtype="bfloat16")
    told = driver_settings(settings_of(spec), parse_options({"sequence_parallel": 2, "offload": True}), 0.5)
    assert (told.device, told.ranks) == ("cpu", 1)
    assert told.verl == Sizes(workers=4, sequence_parallel=2, offload=True, gpus=0.5)


@pytest.mark.parametrize(
    ("options", "gpus", "words"),
    [
        ({"offload": True}, 0.0, "nothing to offload"),
        ({"sequence_parallel": 2}, 1.0, "set dtype='bfloat16'"),
        ({"sequence_parallel": 2}, 0.0, None),
    ],
)
def test_what_the_devices_cannot_do_is_refused_once_they_are_known(
    options: dict[str, Any], gpus: float, words: str | None
) -> None:
    settings = settings_of(ModelSpec(model="calc", ranks=2))
    with nullcontext() if words is None else pytest.raises(ConfigError, match=words):
        driver_settings(settings, parse_options(options), gpus)


@pytest.mark.skipif(find_spec("verl") is not None, reason="verl is here")
def test_without_verl_it_is_said_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"Install it with: .*verl"):
        start_workers(load_policy("calc", device="cpu"), "float32", Sizes())
