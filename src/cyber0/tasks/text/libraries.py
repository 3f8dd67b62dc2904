"""The optional packages that language models need, and transformers without its output."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from cyber0.errors import ConfigError


def load_transformers() -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    need("transformers", "a language model")
    import transformers

    return transformers


def need(package: str, what: str) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise ConfigError(f"{what} needs the package {package}: pip install 'cyber0[text]'")


@contextlib.contextmanager
def quiet(library: Any) -> Iterator[None]:
    """Within this context transformers shows no progress bars, and logs errors only."""
    shown = library.utils.logging
    level, bars = shown.get_verbosity(), shown.is_progress_bar_enabled()
    shown.set_verbosity_error()
    shown.disable_progress_bar()
    try:
        yield
    finally:
        shown.set_verbosity(level)
        if bars:
            shown.enable_progress_bar()
