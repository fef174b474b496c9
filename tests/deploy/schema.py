"""Whether Kubernetes knows every field of a manifest, and its type: by the schemas of its own API.

What an API server decides beyond those (names, references, permissions) is for `tests/litagent/test_kubernetes.py`,
with a real one.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

FILE = Path(__file__).with_name("kubernetes-1.37.json")


def check(manifest: Any) -> None:
    """Raises jsonschema.ValidationError."""
    _validator(manifest["kind"]).validate(manifest)


@cache
def _validator(kind: str) -> jsonschema.Draft202012Validator:
    schemas = json.loads(FILE.read_text())
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{schemas['kinds'][kind]}", "$defs": schemas["$defs"]})
