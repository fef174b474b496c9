"""The small client API, `Client(url).train(agent_fn)`: a thin layer on `agentlightning`.

    from agent_lightning import Client

    client = Client("http://localhost:8000")
    client.upload_data("train.jsonl")
    client.train(agent_fn, nworkers=4)

The server is `python -m agent_lightning.server`; intermediate rewards are in `agent_lightning.runtime`.
"""

from agent_lightning.client import Client, Evaluation, Resource, Task, TrainingResult

__all__ = ["Client", "Evaluation", "Resource", "Task", "TrainingResult"]


def __getattr__(name: str) -> object:
    import agentlightning

    there = (
        f". It is in the package without the underline: agentlightning.{name}" if name in dir(agentlightning) else ""
    )
    raise AttributeError(f"module 'agent_lightning' has no attribute {name!r}{there}", name=name)
