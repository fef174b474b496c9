"""Which key opens `agl serve --training`."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentlightning.cli.serve_training import KEY_FILE, admin_key_of
from agentlightning.errors import ConfigError


def test_a_key_is_made_once_for_a_folder_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    made = admin_key_of(folder, None, "127.0.0.1")
    assert made is not None
    assert len(made) > 24
    assert admin_key_of(folder, None, "localhost") == made, "clients that wait for a job know it after a restart"
    assert (folder / KEY_FILE).stat().st_mode & 0o077 == 0
    assert [file.name for file in folder.iterdir()] == [KEY_FILE]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_key_of_ones_own_is_taken(tmp_path: Path, host: str) -> None:
    assert admin_key_of(tmp_path, "mine", host) == "mine"
    assert not (tmp_path / KEY_FILE).exists()


def test_none_is_made_where_none_is_wanted(tmp_path: Path) -> None:
    assert admin_key_of(tmp_path, None, "127.0.0.1", open_to_all=True) is None
    assert admin_key_of(tmp_path, None, "0.0.0.0") is None, "which the server refuses"
    with pytest.raises(ConfigError):
        admin_key_of(tmp_path, "mine", "127.0.0.1", open_to_all=True)
