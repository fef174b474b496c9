"""Each attempt of a program as a Job of its own on a Kubernetes cluster.

`manifests` has what users set and the Job that is made of it, `api` sends the requests, and `attempt` runs one attempt
and reads how it ended.
"""

from agentlightning.litagent.kubernetes.attempt import run_job
from agentlightning.litagent.kubernetes.manifests import AttemptWork, Kubernetes, server_of

__all__ = ["AttemptWork", "Kubernetes", "run_job", "server_of"]
