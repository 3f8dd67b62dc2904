"""Settings: what can be set, what a value may be, and what can be named.

    config = load("examples/mnist.toml", overrides=["method.k=16", "aggregation.rule=median"])

schema.py declares the sections and consistency.py has what must hold between them; keys.py is one setting; registry.py
is what a name may stand for. `Config` and `load` are loaded when they are first used, so that a module here can be
imported by itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyber0.config.files import load as load
    from cyber0.config.schema import Config as Config

__all__ = ["Config", "load"]

_HOMES = {"Config": "schema", "load": "files"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"cyber0.config.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'cyber0.config' has no attribute {name!r}")
