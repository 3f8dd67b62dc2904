"""The user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """Return $CYBER0_CACHE, or cyber0/ in the user's cache folder; it need not exist."""
    own, shared = os.environ.get("CYBER0_CACHE"), os.environ.get("XDG_CACHE_HOME")
    base = Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "cyber0"
    return base.expanduser()
