"""Arrays of token ids and log-probs, and numpy, which the package can do without where nothing is sampled or learned.

The extra `torch` brings numpy. A store, its server, runners, and a gateway in front of other providers only hand arrays
on: where numpy is not installed, these are read-only memoryviews of the same values. `np` is numpy, loaded when it is
first used, so that a module may compute with it and still be imported without it.

Kept tokens, those that a filter (top_p, top_k, min_p) left to draw each sampled token from, are one int32 array for a
run of T tokens: T counts, then the ids of the first token's set, of the second's, and so on. A count of 0 means that
nothing was cut away, or that it was not written down. So a token that was drawn freely costs 4 bytes, and any other one
4 more for each choice that its filter left. Of the functions for them only `kept_table` needs numpy.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
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


MOST_KEPT = 512
"""The largest set that is written down."""
_BYTES = 4


def kept_array(sets: Sequence[Int32Array | Sequence[int] | None]) -> Int32Array | None:
    """The array for tokens with these sets (None: the whole vocabulary); None if no token has a set."""
    if all(one is None for one in sets):
        return None
    counts = int32_bytes([0 if one is None else len(one) for one in sets])
    return int32_array(counts + b"".join(int32_bytes(one) for one in sets if one is not None))


def kept_bytes(parts: Iterable[tuple[bytes | None, int]]) -> bytes | None:
    """Several arrays that follow each other, each with its number of tokens, as one; in bytes."""
    found = list(parts)
    if all(data is None for data, _ in found):
        return None
    cut = [(bytes(_BYTES * tokens) if data is None else data, _BYTES * tokens) for data, tokens in found]
    return b"".join(data[:end] for data, end in cut) + b"".join(data[end:] for data, end in cut)


def joined_kept(parts: Sequence[tuple[Int32Array | None, int]]) -> Int32Array | None:
    """`kept_bytes` for arrays."""
    data = kept_bytes((None if kept is None else int32_bytes(kept), tokens) for kept, tokens in parts)
    return None if data is None else int32_array(data)


def fits_kept(data: bytes, tokens: int) -> bool:
    """Whether these bytes are the array of so many tokens."""
    if len(data) % _BYTES or len(data) < _BYTES * tokens:
        return False
    counts = int32_array(data[: _BYTES * tokens]).tolist()
    return min(counts, default=0) >= 0 and tokens + sum(counts) == len(data) // _BYTES


def kept_table(kept: Int32Array | None, tokens: int) -> Int32Array:
    """The sets as rows, shape [T, K]: −1 where a row has no more, and in all of a row without a set."""
    if kept is None:
        return np.full((tokens, 0), -1, dtype=np.int32)
    counts_T = kept[:tokens]
    table_TK = np.full((tokens, int(counts_T.max(initial=0))), -1, dtype=np.int32)
    table_TK[np.arange(table_TK.shape[1]) < counts_T[:, None]] = kept[tokens:]
    return table_TK
