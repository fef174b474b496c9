"""The command that is advised for a missing extra fits how the package was installed."""

from __future__ import annotations

import json
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from agentlightning.installation import requirements

METADATA = """Metadata-Version: 2.4
Name: agentlightning
Version: 0.3.0
Provides-Extra: torch
Requires-Dist: numpy>=1.26
Requires-Dist: torch>=2.6; extra == 'torch'
Requires-Dist: transformers<6,>=5.10; extra == "torch"
Requires-Dist: pyarrow>=15; extra == 'parquet'
"""


def advised(folder: Path, origin: dict[str, object] | None) -> str:
    """What pip is given in an environment whose records say that the package was installed so."""
    info = folder / "agentlightning-0.3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    return requirements(PathDistribution(info), "torch")


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///home/me/agl", "dir_info": {"editable": True}}, "-e '/home/me/agl[torch]'"),
        ({"url": "file:///home/me/my%20agl", "dir_info": {}}, "'/home/me/my agl[torch]'"),
        (
            {"url": "https://git.example/agl", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "'agentlightning[torch] @ git+https://git.example/agl@abc'",
        ),
        (
            {"url": "file:///tmp/agentlightning-0.3.0-py3-none-any.whl", "archive_info": {}},
            "'agentlightning[torch] @ file:///tmp/agentlightning-0.3.0-py3-none-any.whl'",
        ),
        (None, "'torch>=2.6' 'transformers<6,>=5.10'"),
    ],
    ids=["a clone, editable", "a folder", "a repository", "a wheel", "an index"],
)
def test_the_advice_fits(tmp_path: Path, origin: dict[str, object] | None, command: str) -> None:
    assert advised(tmp_path, origin) == command
