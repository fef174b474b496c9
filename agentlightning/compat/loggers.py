"""Setting up logging for a script."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

ROOT = "agentlightning"
FORMAT = "%(asctime)s [%(levelname)s] (Process-%(process)d %(name)s)   %(message)s"


def setup(
    level: int | str = "INFO",
    *,
    console: bool = True,
    color: bool | Mapping[str, Any] = True,
    propagate: bool = False,
    submodule_levels: Mapping[str, int | str] | None = None,
    extra_handlers: Iterable[logging.Handler] | None = None,
    formatter: logging.Formatter | None = None,
    apply_to: Iterable[str] | None = None,
    files: str | Mapping[str, str] | None = None,
    capture_warnings: bool = False,
    disable_existing_loggers: bool = False,
) -> None:
    """Log this package at `level`: to the terminal, to `files`, to handlers of one's own. Repeating replaces."""
    if disable_existing_loggers:
        for name in list(logging.root.manager.loggerDict):
            if name.partition(".")[0] != ROOT:
                logging.getLogger(name).disabled = True
    if capture_warnings:
        logging.captureWarnings(True)
    for name in (ROOT, *(apply_to or ())):
        setup_module(
            level,
            name,
            console=console,
            color=color,
            propagate=propagate,
            extra_handlers=extra_handlers,
            formatter=formatter,
            file=files if isinstance(files, str) else (files or {}).get(name),
        )
    for name, own in (submodule_levels or {}).items():
        logging.getLogger(name).setLevel(own)


def setup_module(
    level: int | str = "INFO",
    name: str = ROOT,
    *,
    console: bool = True,
    color: bool | Mapping[str, Any] = True,
    propagate: bool = False,
    extra_handlers: Iterable[logging.Handler] | None = None,
    formatter: logging.Formatter | None = None,
    file: str | None = None,
) -> logging.Logger:
    """The same for one logger."""
    logger = logging.getLogger(name)
    for handler in [h for h in logger.handlers if getattr(h, "agentlightning_made", False)]:
        logger.removeHandler(handler)
        handler.close()
    made: list[logging.Handler] = [_console(bool(color))] if console else []
    if file is not None:
        made.append(logging.FileHandler(file, encoding="utf-8"))
    for handler in made:
        handler.agentlightning_made = True  # pyright: ignore[reportAttributeAccessIssue]
        if formatter is not None or isinstance(handler, logging.FileHandler):
            handler.setFormatter(formatter or logging.Formatter(FORMAT))
    for handler in (*made, *(extra_handlers or ())):
        if handler not in logger.handlers:
            logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = propagate
    return logger


def _console(color: bool) -> logging.Handler:
    from agentlightning.console import Console, SafeFormatter

    if color:
        from rich.logging import RichHandler

        return RichHandler(console=Console(stderr=True), show_path=False)
    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter(FORMAT))
    return handler


def configure_logger(level: int | str = "INFO", name: str = ROOT) -> logging.Logger:
    """Log one logger to the terminal."""
    return setup_module(level, name, color=False)
