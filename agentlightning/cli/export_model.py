"""`agl export --to`: a trained model for other programs: as it is, merged, as GGUF, or pushed to the Hub."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentlightning.algorithm.checkpoint import card_of, held_checkpoint, model_path, read_checkpoint
from agentlightning.cli.commands.serve import ExportOptions
from agentlightning.console import terminal
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.files import atomic_directory
from agentlightning.metrics.card import CARD_FILE, Kind
from agentlightning.models import resolve_model

GGUF_FILE = "model.gguf"


def export_model(form: ExportOptions) -> None:
    """Write the model of a run, of a checkpoint, or by its name, and push it where that is asked for."""
    chosen = (form.min_reward, form.mode, form.agent)
    if form.best_per_task or any(value is not None for value in chosen):
        raise ConfigError("Which rollouts are chosen matters with --jsonl, --parquet and --atif only.")
    if form.public and form.push is None:
        raise ConfigError("--public is for a repository that is made with --push.")
    if form.to is None and form.push is None:
        raise ConfigError("Say where the model goes: --to FOLDER, --push NAME/REPOSITORY, or both.")
    if form.to is not None and form.to.exists():
        raise ConfigError(f"'{form.to}' is there already; export to a new folder.")
    if form.push is not None:
        _token()  # before anything is computed
    with _weights(form.source, form.policy) as weights, _folder(form.to) as to:
        _write(weights, to, form)
        screen = terminal()
        if form.to is not None:
            screen.print(f"{to}: {', '.join(sorted(p.name for p in to.iterdir()))}", soft_wrap=True, markup=False)
        if form.push is not None:
            screen.print(f"pushed to {_push(to, form.push, private=not form.public)}", soft_wrap=True, markup=False)


@contextmanager
def _weights(source: str, policy: str | None) -> Iterator[Path]:
    """The model's folder; a run does not remove it within the block."""
    with held_checkpoint(Path(source)) as checkpoint:
        found = Path(resolve_model(source)) if checkpoint is None else model_path(checkpoint)
        if not found.is_dir():
            raise ConfigError(f"'{source}' is no folder on this machine: there is nothing to export.")
        several = sorted(p.parent.name for p in found.glob("*/adapter_config.json"))
        if several and policy not in several:
            raise ConfigError(f"The run trained several policies; say which with --policy: {', '.join(several)}.")
        if policy is not None and not several:
            raise ConfigError(f"'{source}' holds one policy alone; leave --policy out.")
        yield found / policy if policy else found


@contextmanager
def _folder(to: Path | None) -> Iterator[Path]:
    if to is not None:
        yield to
        return
    with tempfile.TemporaryDirectory(prefix="agl-export-") as folder:
        yield Path(folder) / "model"


def _write(weights: Path, to: Path, form: ExportOptions) -> None:
    links = (file for file in weights.rglob("*") if file.is_symlink()) if _checkpoint_of(weights) is not None else ()
    if (link := next(iter(links), None)) is not None:  # a run that was copied from elsewhere may have one to any file
        raise ConfigError(f"{link} is a link, and a checkpoint has none. Look where it leads, and take it away.")
    if form.gguf:
        from agentlightning.learner.gguf_file import export_gguf

        with atomic_directory(to, shared=True) as folder:
            export_gguf(weights, folder / GGUF_FILE)
    elif form.merged:
        from agentlightning.learner.policy import export_merged

        export_merged(weights, to)
    else:
        with atomic_directory(to, shared=True) as folder:
            shutil.copytree(weights, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
    if (checkpoint := _checkpoint_of(weights)) is not None and (form.gguf or form.merged):
        kind: Kind = "gguf" if form.gguf else "merged" if (weights / "adapter_config.json").is_file() else "weights"
        card = card_of(checkpoint.parent.parent, read_checkpoint(checkpoint), kind)
        (to / CARD_FILE).write_text(card, encoding="utf-8")


def _checkpoint_of(weights: Path) -> Path | None:
    """The checkpoint that a model's folder is in; None for a model from elsewhere."""
    return next((p for p in (weights.parent, weights.parent.parent) if (p / "checkpoint.json").is_file()), None)


# ---- the Hugging Face Hub --------------------------------------------------------------------------------------------


def _token() -> str:
    """Raises ConfigError where there is none."""
    try:
        from huggingface_hub import get_token
    except ImportError:
        raise ConfigError("Pushing needs the package huggingface_hub: pip install huggingface_hub.") from None
    token = get_token()
    if not token:
        raise ConfigError(
            "There is no token of the Hugging Face Hub to push with. Make one with write access at "
            "https://huggingface.co/settings/tokens, and set HF_TOKEN to it or run `hf auth login`."
        )
    return token


def _push(folder: Path, repository: str, *, private: bool) -> str:
    """Upload all files to a repository, which is made if it is not there; its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    api = HfApi(token=_token())
    try:
        made = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id, folder_path=folder, commit_message="Trained with Agent Lightning", run_as_future=False
        )
    except OfflineModeIsEnabled as error:
        raise ConfigError("HF_HUB_OFFLINE is set, so nothing can be pushed; unset it.") from error
    except HFValidationError as error:
        raise ConfigError(f"'{repository}' is no name of a repository: {error}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        advice = " Is the token valid, and may it write there?" if status in (401, 403) else ""
        raise PushError(f"The Hub refused {repository}: {error}{advice}") from error
    except OSError as error:
        raise PushError(f"The Hub cannot be reached: {error}") from error
    return str(made)


class PushError(AgentLightningError):
    """A model could not be pushed."""
