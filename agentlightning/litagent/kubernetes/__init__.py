"""Each attempt of a program as a Job of its own on a Kubernetes cluster.

`settings` is what users say, `manifests` what is made of it, `endings` what became of it, `api` the requests, and
`attempt` the whole of one.
"""

from agentlightning.litagent.kubernetes.attempt import run_job
from agentlightning.litagent.kubernetes.manifests import AttemptWork, Kubernetes, server_of

__all__ = ["AttemptWork", "Kubernetes", "run_job", "server_of"]
