"""Plain data as bytes between a response and its tests, and numbers for other objects."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

PLAIN = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)


class Packer(pickle.Pickler):
    """Plain data, also of derived types and arrays; a number for everything else."""

    def __init__(self, file: io.BytesIO, number_of: Callable[[Any], int]) -> None:
        super().__init__(file)
        self._number_of = number_of

    def persistent_id(self, value: Any) -> int | None:
        """Numbers stand for what is not plain."""
        plain = (
            value is None
            or isinstance(value, PLAIN)
            or hasattr(type(value), "tolist")
            or any(value is t for t in PLAIN)
        )
        return None if plain else self._number_of(value)

    def reducer_override(self, value: Any) -> Any:
        """The plain value of a derived type."""
        if hasattr(type(value), "tolist"):
            plain = value.tolist()
            return type(plain), (plain,)
        base = next((base for base in PLAIN if isinstance(value, base) and type(value) is not base), None)
        return NotImplemented if base is None else (base, (base(value),))


class Unpacker(pickle.Unpickler):
    """Makes plain data, and nothing else."""

    def __init__(self, file: io.BytesIO, found: Callable[[int], Any]) -> None:
        super().__init__(file)
        self._found = found

    def persistent_load(self, number: int) -> Any:
        """What a number stands for."""
        return self._found(number)

    def find_class(self, module: str, name: str) -> Any:
        """One of `PLAIN`."""
        return {base.__name__: base for base in PLAIN}[name]


def packed(value: Any, number_of: Callable[[Any], int]) -> bytes:
    """The value as bytes."""
    file = io.BytesIO()
    Packer(file, number_of).dump(value)
    return file.getvalue()


def unpacked(message: bytes, found: Callable[[int], Any]) -> Any:
    """The value of such bytes."""
    return Unpacker(io.BytesIO(message), found).load()
