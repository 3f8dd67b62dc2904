"""Which name was probably meant: "did you mean ...?"."""

from __future__ import annotations

from collections.abc import Iterable

OTHER_WORDS = {"gpu": "cuda", "nvidia": "cuda", "processor": "cpu", "fp32": "float32", "fp16": "float16",
               "half": "float16", "bf16": "bfloat16", "average": "mean", "normal": "gaussian",
               "learning_rate": "lr", "learningrate": "lr"}  # fmt: skip
"""What people type for a name: an error suggests the name, whatever else is spelled alike ("gpu" is not "cpu")."""


def closest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name that was probably meant, if one is as near as difflib's `cutoff` asks."""
    import difflib

    known = list(names)
    if OTHER_WORDS.get(name.lower()) in known:
        return OTHER_WORDS[name.lower()]
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), None)


def suggestion(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Say what was probably meant, with a prefix that all names have, or what is possible."""
    known = list(names)
    near = closest(name, known)
    return f"did you mean {prefix + near!r}?" if near else f"possible are {', '.join(known)}"
