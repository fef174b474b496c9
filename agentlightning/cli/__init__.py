"""The `agl` command. Prints; everything else is done elsewhere."""

from __future__ import annotations

import logging
import sys

from agentlightning.errors import AgentLightningError


def main() -> None:
    """Entry point: errors made for the user end in one message, without a traceback."""
    from rich.console import Console

    from agentlightning.cli.app import app

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except AgentLightningError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"Error: {error}", style="red", markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
