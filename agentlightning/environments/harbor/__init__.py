"""`harbor:PATH`: tasks in Harbor's format, which are read here without Harbor itself.

format      a task's folder and its task.toml           trial         one attempt: set up, let the agent work, verify
boxes       what a task runs in: a container, a sandbox environment   the environment: tasks, agent, probes
"""

from agentlightning.environments.harbor.environment import HarborEnvironment

__all__ = ["HarborEnvironment"]
