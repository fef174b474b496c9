"""Asking the Hugging Face hub for a model's config.json: quickly, and with words where it cannot be had.

Left alone, the hub's client tries for half a minute to reach a host that is not there, and for a name that was a typo.
"""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from agentlightning.errors import ModelError

_SECONDS = 5.0


def config_from_hub(name: str) -> Path | None:
    """The config.json of a Hugging Face id, from the cache or downloaded; None where the hub's client is not installed.

    Raises ModelError that says why it cannot be had.
    """
    try:
        from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError
    except ImportError:
        return None
    try:
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        if constants.HF_HUB_OFFLINE:
            raise _not_here(name, "and HF_HUB_OFFLINE=1 forbids to look for it on the Hugging Face hub")
        if not _reachable(constants.ENDPOINT):
            raise _not_here(name, f"and the Hugging Face hub ({constants.ENDPOINT}) cannot be reached from here")
        return Path(hf_hub_download(name, "config.json", etag_timeout=_SECONDS))
    except GatedRepoError:
        raise ModelError(
            f"'{name}' could not be loaded: its owners ask who uses it. Accept their terms at "
            f"{constants.ENDPOINT}/{name}, then run: hf auth login"
        ) from None
    except RepositoryNotFoundError:
        raise _not_here(name, "nor on the Hugging Face hub (or it is private: hf auth login)") from None
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise _not_here(name, f"and the hub answered: {str(error).splitlines()[0]}") from None


def _not_here(name: str, why: str) -> ModelError:
    folder = Path(name).parent
    mistyped = f" The folder '{folder}' is here, but there is no '{Path(name).name}' in it." if folder.is_dir() else ""
    return ModelError(
        f"The model '{name}' could not be loaded: it is neither in this directory nor downloaded, {why}.{mistyped} "
        "Check the name, or give a directory with a model, or 'calc', which ships with the package."
    )


def _reachable(endpoint: str) -> bool:
    """Whether the host answers at all. Behind a proxy only the proxy knows."""
    if getproxies():
        return True
    url = urlsplit(endpoint)
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        with socket.create_connection((url.hostname or "", port), timeout=_SECONDS):
            return True
    except OSError:
        return False
