"""`harbor:PATH` and `harbor:NAME@VERSION`: tasks in Harbor's format, which are read here without Harbor itself.

format      a task's folder and its task.toml           trial         one attempt: set up, let the agent work, verify
compose     a task's services, checked (compose_keys)   environment   the environment: tasks, agent, probes
boxes       what a task runs in, and a sandbox of it    containers    a container as a box
project     several containers, one of them the box     pods          a cluster's pod as a box
engines     which of these a task gets                  removal       what ends them with this process
registry    data sets by name                           repository    folders of a git repository, fetched once
dataset     dataset.toml of a folder of tasks           artifacts     what crosses over to a verifier apart
archives    files that a box packs
"""

from agentlightning.environments.harbor.environment import HarborEnvironment

__all__ = ["HarborEnvironment"]
