"""What runs inside vLLM's workers: taking new weights from a directory. Imported by vLLM, in its environment, by name.

vLLM reloads a checkpoint in place. On a CPU it keeps a second, packed copy of the output layer; where that layer is
tied to the embeddings the checkpoint has no tensor of its own for it, so the copy would stay as it was. The weights of
experts it packs when it starts and not when it reloads, so its kernel would read the new ones as if they were packed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Publication:
    """Mixed into vLLM's worker class (`--worker-extension-cls`)."""

    model_runner: Any
    reload_weights: Any

    def agl_load_weights(self, path: str) -> str:
        """Compute with the weights in a Hugging Face directory from now on; returns `path`.

        A directory without weights is refused before anything is touched: vLLM would be left with none.
        """
        if not any(Path(path).glob("*.safetensors")):
            raise FileNotFoundError(f"there are no *.safetensors in {path}")
        self.reload_weights(weights_path=path)
        self._repack_output_layer()
        self._repack_experts()
        return path

    def _repack_output_layer(self) -> None:
        from vllm.model_executor.layers.utils import (  # pyright: ignore[reportMissingImports]
            dispatch_cpu_unquantized_gemm,
        )
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

        head = getattr(self.model_runner.get_model(), "lm_head", None)
        if head is not None and current_platform.is_cpu():
            dispatch_cpu_unquantized_gemm(getattr(head, "base_layer", head), remove_weight=False)

    def _repack_experts(self) -> None:
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

        for layer in self.model_runner.get_model().modules() if current_platform.is_cpu() else ():
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None and hasattr(layer, "w13_weight"):
                kernel.fused_experts.process_weights_after_loading(layer)
