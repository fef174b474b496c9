"""Arrays of token ids and log-probs, and numpy, which the package can do without where nothing is sampled or learned.

The extra `torch` brings numpy. A store, its server, runners, and a gateway in front of other providers only hand arrays
on: where numpy is not installed, these are read-only memoryviews of the same values. `np` is numpy, loaded when it is
first used, so that a module may compute with it and still be imported without it.
"""

from __future__ import annotations

from array import array
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from agentlightning.errors import missing_extra

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray
    Int32Array = np.ndarray[Any, np.dtype[np.int32]]
    Float32Array = np.ndarray[Any, np.dtype[np.float32]]
    Float64Array = np.ndarray[Any, np.dtype[np.float64]]
else:

    class _Numpy:
        """Stands for the module; what was used once is an attribute of its own, as fast as the module's."""

        def __getattr__(self, name: str) -> Any:
            try:
                import numpy
            except ModuleNotFoundError:
                raise missing_extra("torch", "numpy") from None
            found = getattr(numpy, name)
            setattr(self, name, found)
            return found

    np = _Numpy()

    class _ArrayType(type):
        """For decoders, which ask what a field holds: whatever is like an array is an instance."""

        def __instancecheck__(cls, value: object) -> bool:
            return hasattr(value, "tolist")

    class Array(metaclass=_ArrayType): ...

    class Int32Array(Array): ...

    class Float32Array(Array): ...

    class Float64Array(Array): ...


HAS_NUMPY = find_spec("numpy") is not None


def int32_array(data: bytes | bytearray | memoryview) -> Int32Array:
    """The little-endian int32 in `data`, without a copy; read-only if `data` is."""
    return np.frombuffer(data, "<i4") if HAS_NUMPY else cast("Int32Array", memoryview(data).cast("B").cast("i"))


def float32_array(data: bytes | bytearray | memoryview) -> Float32Array:
    """The little-endian float32 in `data`, without a copy; read-only if `data` is."""
    return np.frombuffer(data, "<f4") if HAS_NUMPY else cast("Float32Array", memoryview(data).cast("B").cast("f"))


def int32_bytes(values: Any) -> bytes:
    """Token ids, in an array or a sequence of any kind, as little-endian int32."""
    return np.asarray(values, dtype="<i4").tobytes() if HAS_NUMPY else array("i", values).tobytes()


def float32_bytes(values: Any) -> bytes:
    """Numbers, in an array or a sequence of any kind, as little-endian float32."""
    return np.asarray(values, dtype="<f4").tobytes() if HAS_NUMPY else array("f", values).tobytes()
