"""Environments of other people: their tasks, what works on them, and their rewards, by one name such as `gym:Taxi-v4`.

An environment is a file here and a line in `base.SCHEMES`.

base       the seam, and loading one by its scheme      playing    what those share that the model itself plays
gym        observations and actions of Gymnasium        openenv    a server of OpenEnv: words, or tools of MCP
foreign    those in an interpreter of their own        inspect    a task of inspect_ai; its worker is in workers
harbor     tasks in Harbor's format: an agent in a box, and a verifier
"""

from agentlightning.environments.base import SCHEMES, Environment, Probe, load_environment

__all__ = ["SCHEMES", "Environment", "Probe", "load_environment"]
