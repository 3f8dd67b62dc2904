"""Thinning a long curve so that it looks the same."""

from __future__ import annotations

import math
from collections.abc import Sequence


def thin(columns: Sequence[Sequence[float]], most: int) -> list[int]:
    """Return which rows to keep, in order: at most `most`, the first, the last, and every extreme.

    The rows are divided into equal stretches, and the lowest and highest value of every column in each are kept. So no
    peak, drop or gap is lost, as it would be by averaging or by taking every n-th row.
    """
    rows = len(columns[0])
    if rows <= most:
        return list(range(rows))
    stretches = (most - 2) // (2 * len(columns))
    if stretches < 1:
        raise ValueError(f"{most} rows can't show {len(columns)} columns; allow at least {2 * len(columns) + 2}")
    kept = {0, rows - 1}
    for stretch in range(stretches):
        places = range(stretch * rows // stretches, (stretch + 1) * rows // stretches)
        for column in columns:
            finite = [place for place in places if math.isfinite(column[place])]
            if finite:
                kept.add(min(finite, key=column.__getitem__))
                kept.add(max(finite, key=column.__getitem__))
            else:
                kept.add(places[0])
    return sorted(kept)
