"""Reads a .gguf file once, where transformers reads it for each of config, tokenizer and weights.

The file holds every token of the vocabulary, which takes seconds to read; and the table of weight names is built for
each module of the model, which takes as long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any


class ReadOnce:
    """The contents of .gguf files read so far, until `forget`."""

    def __init__(self) -> None:
        self._read: dict[str, Any] = {}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Within this context a file that was read before is not read again."""
        import gguf

        reader, names = gguf.GGUFReader, gguf.get_tensor_name_map

        def read(path: Any, *args: Any, **named: Any) -> Any:
            if args or named:
                return reader(path, *args, **named)
            if str(path) not in self._read:
                self._read[str(path)] = reader(path)
            return self._read[str(path)]

        gguf.GGUFReader, gguf.get_tensor_name_map = read, cache(names)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = reader, names

    def forget(self) -> None:
        """Release the contents: the tokens of a vocabulary take a hundred megabytes."""
        self._read.clear()
