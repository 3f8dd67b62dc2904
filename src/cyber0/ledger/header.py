"""A ledger's beginning: all that, with the starting weights, turns its records into a model."""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from cyber0 import optimizers
from cyber0.config.choices import CODECS, DTYPES, ESTIMATORS, PROBING_ESTIMATORS, SEED_MODES, Choices
from cyber0.directions import DISTRIBUTIONS, DirectionSpace
from cyber0.directions.definition import ROUNDINGS
from cyber0.errors import ConfigError, LedgerError
from cyber0.ledger.settings import check_settings, with_fields

CHAIN_BYTES = 8
"""How much of the chain hash travels in messages and in the key of a chained round."""
FORMAT = 2

INDEX_LIMIT = 1 << 24
_SIZE_LIMIT, _RANK_LIMIT = 1 << 63, 64
DIGEST = re.compile(r"[0-9a-f]{64}")

Check = tuple[Callable[[Any], bool], str]
_ANY = object()


def _is_whole(value: object) -> bool:
    return type(value) is int  # True is not a number here


def _is_number(value: object) -> bool:
    """Return whether a value is a finite number; a whole one may stand for it, as long as a float can hold it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _whole(low: int, high: int, limits: str) -> Check:
    return lambda value: _is_whole(value) and low <= value <= high, f"a whole number, {limits}"


def _choice(names: Choices) -> Check:
    return lambda value: isinstance(value, str) and value in names, f"one of {', '.join(names)}"


_DIGEST: Check = (lambda v: isinstance(v, str) and DIGEST.fullmatch(v) is not None, "64 hexadecimal digits")
_FIELDS: dict[str, Check] = {
    "seed": _whole(0, (1 << 64) - 1, "0 to 2**64 - 1"),
    "layout": (lambda v: isinstance(v, (tuple, list)), "a list of entries"),
    "rank": _whole(1, INDEX_LIMIT, "1 to 2**24"),
    "k": _whole(1, INDEX_LIMIT, "1 to 2**24"),
    "local_epochs": _whole(1, INDEX_LIMIT, "1 to 2**24"),
    "mu": (lambda v: _is_number(v) and v >= 0, "a finite number, at least 0"),
    "estimator": _choice(ESTIMATORS),
    "lr": (lambda v: _is_number(v) and v > 0, "a finite number above 0"),
    "lr_schedule": (lambda v: isinstance(v, str) and v != "", "the name of a schedule, as constant"),
    "projection_radius": (lambda v: v is None or (_is_number(v) and v > 0), "a finite number above 0, or null"),
    "weights_digest": _DIGEST,
    "rest_digest": _DIGEST,
    "clients": _whole(1, INDEX_LIMIT, "1 to 2**24"),
    "settings": (lambda v: isinstance(v, dict), "a table"),
    "codec": _choice(CODECS),
    "seed_mode": _choice(SEED_MODES),
    "id": (lambda v: isinstance(v, str) and re.fullmatch(r"([0-9a-f]{32})?", v) is not None,
           "32 hexadecimal digits, or empty"),
    "format": (lambda v: _is_whole(v) and v in (1, FORMAT), f"1 or {FORMAT}"),
}  # fmt: skip
"""What each field may be: a test, and the same in words."""

DEFINITIONS: dict[str, dict[str, int]] = {
    "distribution": dict.fromkeys(DISTRIBUTIONS, 1),
    "rounding": dict.fromkeys(ROUNDINGS, 1),
    "optimizer": dict.fromkeys(optimizers.OPTIMIZERS, 1),
}
"""What turns scalars into weights, by name, with the version of each definition that docs/FORMAT.md gives.

A change of the bits that one of them gives is a new version, or a new name.
"""


def _impossible(name: str, value: object, limits: str) -> LedgerError:
    return LedgerError(f"{name} = {reprlib.repr(value)} in a ledger's header is impossible; it must be {limits}")


@dataclass(frozen=True)
class LayoutEntry:
    """Where one weight tensor is in the flat vector w; `offset` counts coordinates, `dtype` is e.g. "bfloat16"."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    def __post_init__(self) -> None:
        if not isinstance(self.shape, (tuple, list)):
            raise _impossible("layout.shape", self.shape, "a list of whole numbers")
        object.__setattr__(self, "shape", tuple(self.shape))
        if type(self.name) is not str:
            raise _impossible("layout.name", self.name, "a string")
        if not all(_is_whole(length) and 0 <= length < _SIZE_LIMIT for length in self.shape):
            raise _impossible(f"layout.shape of {self.name!r}", self.shape, "whole numbers, 0 to 2**63 - 1")
        size = 1
        for length in self.shape:
            size *= length
            if size >= _SIZE_LIMIT or len(self.shape) > _RANK_LIMIT:
                raise _impossible(f"layout.shape of {self.name!r}", self.shape, "of fewer than 2**63 coordinates")
        if self.dtype not in DTYPES:
            raise _impossible(f"layout.dtype of {self.name!r}", self.dtype, f"one of {', '.join(DTYPES)}")
        if not _is_whole(self.offset) or self.offset < 0:
            raise _impossible(f"layout.offset of {self.name!r}", self.offset, "a whole number, at least 0")

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Header:
    """All that, with the starting weights, turns the records into a model.

    `rank` is that of low-rank directions; others have none, and 1 here. `settings` is what else of the config the
    participants agree on, without what the header has itself; `config` has both. `id` tells runs of one config apart; a
    simulation, which its config determines, has none.
    """

    seed: int
    layout: tuple[LayoutEntry, ...]
    distribution: str
    k: int
    local_epochs: int
    mu: float
    estimator: str
    lr: float
    lr_schedule: str
    projection_radius: float | None
    weights_digest: str
    rest_digest: str
    clients: int
    settings: dict[str, Any] = field(default_factory=dict)
    codec: str = "float32"
    seed_mode: str = "shared"
    rounding: str = "stochastic"
    optimizer: str = "sgd"
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    rank: int = 1
    id: str = ""
    format: int = FORMAT

    def __post_init__(self) -> None:
        for name, (valid, limits) in _FIELDS.items():
            if not valid(getattr(self, name)):
                raise _impossible(name, getattr(self, name), limits)
        for name in DEFINITIONS:
            _check_definition(name, getattr(self, name))
        if not DISTRIBUTIONS[self.distribution].shaped and self.rank != 1:
            raise _impossible("rank", self.rank, f"1 with distribution = {self.distribution!r}")
        if DISTRIBUTIONS[self.distribution].shaped and self.format == 1:
            raise _impossible("distribution", self.distribution, "an older one in format 1")
        self._complete_options()
        optimizer = optimizers.make(self.optimizer, self.optimizer_options)
        if self.k < optimizer.least_scalars:
            raise _impossible("k", self.k, f"at least {optimizer.least_scalars} with optimizer = {self.optimizer!r}")
        if self.local_epochs > 1 and optimizer.vectors:
            raise _impossible("local_epochs", self.local_epochs, f"1 with optimizer = {self.optimizer!r}")
        if self.estimator in PROBING_ESTIMATORS and self.mu == 0:
            raise _impossible("mu", self.mu, f'above 0 with estimator = "{self.estimator}", which divides by it')
        if self.scalars >= INDEX_LIMIT:
            raise LedgerError(f"local_epochs * k = {self.scalars} must be less than 2**24, the number of directions")
        object.__setattr__(self, "layout", tuple(self.layout))
        self._check_layout()
        check_settings(self.settings, vars(self), repeated=self.format == 1)
        try:  # as it will be read back, so that a header equals itself after a journey through a file
            object.__setattr__(self, "settings", json.loads(json.dumps(self.settings, allow_nan=False)))
            self.to_json()
        except (TypeError, ValueError) as error:
            raise LedgerError(f"a ledger's header can't be written as JSON: {error}") from error
        except RecursionError:
            raise LedgerError("a ledger's header can't be written as JSON: it is nested too deeply") from None

    def _complete_options(self) -> None:
        """Refuse options that the optimizer does not take; those left out get their defaults: all are stated."""
        if not isinstance(self.optimizer_options, dict):
            raise _impossible("optimizer.options", self.optimizer_options, "a table")
        try:
            options = optimizers.full_options(self.optimizer, self.optimizer_options)
        except ConfigError as error:
            raise LedgerError(f"a ledger's header states impossible options: {error}") from error
        object.__setattr__(self, "optimizer_options", options)

    def _check_layout(self) -> None:
        """Refuse weights that leave coordinates out, share them, or share a name."""
        end, names = 0, set[str]()
        for entry in self.layout:
            if not isinstance(entry, LayoutEntry):
                raise _impossible("layout", entry, "a list of entries")
            if entry.offset != end:
                raise LedgerError(
                    f"weight {entry.name!r} in the layout of a ledger's header begins at coordinate {entry.offset}, "
                    f"and the weights before it end at {end}"
                )
            if entry.name in names:
                raise LedgerError(f"two weights are named {entry.name!r} in the layout of a ledger's header")
            end += entry.size
            names.add(entry.name)
        if end >= _SIZE_LIMIT:
            raise LedgerError("the layout of a ledger's header has 2**63 coordinates or more")
        if end == 0:
            raise LedgerError("the layout of a ledger's header has no coordinates: there is nothing to train")

    @property
    def dimension(self) -> int:
        """d, how many weights are trained."""
        return sum(entry.size for entry in self.layout)

    @cached_property
    def space(self) -> DirectionSpace:
        """Which directions are drawn."""
        return DirectionSpace.of(self.distribution, [entry.shape for entry in self.layout], self.rank)

    @property
    def config(self) -> dict[str, Any]:
        """All settings that the run was started with; none if it was not started from a config."""
        if not self.settings or self.format == 1:
            return self.settings
        return with_fields(self.settings, vars(self))

    @property
    def scalars(self) -> int:
        """How many scalars a round decides: k for each local epoch."""
        return self.k * self.local_epochs

    @property
    def rounds(self) -> int:
        """How many rounds the run was to have when it started; 0: no number was set."""
        found = self.settings.get("rounds", 0)
        return found if _is_whole(found) else 0

    def round_key(self, chain: bytes) -> int:
        """Return the key that a round's directions and roundings are drawn with.

        `chain` is the hash that the ledger had reached before the round, or the 8 bytes of it that travel. The key is
        the seed itself, or if chained the first 8 bytes of SHA-256("cyber0 round key" | seed | 8 bytes of the chain).
        """
        if self.seed_mode == "shared":
            return self.seed
        if len(chain) < CHAIN_BYTES:
            raise LedgerError(f"a chained round needs {CHAIN_BYTES} bytes of the hash before it, got {len(chain)}")
        text = b"cyber0 round key" + self.seed.to_bytes(8, "little") + chain[:CHAIN_BYTES]
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")

    def differences(self, other: Header) -> list[str]:
        """Return the names of what the two headers differ in, their format aside."""
        names = [item.name for item in fields(self) if item.name != "format"]
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    def to_json(self) -> bytes:
        """Return the canonical JSON: sorted keys, no spaces."""
        if self.format == 1:
            from cyber0.ledger import format1

            return canonical(format1.tables(self))
        found: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        found["layout"] = [{"name": e.name, "shape": list(e.shape), "dtype": e.dtype} for e in self.layout]
        options = {"optimizer": found.pop("optimizer_options")}
        rank = found.pop("rank")
        if DISTRIBUTIONS[self.distribution].shaped:
            options["distribution"] = {"rank": rank}
        for name, versions in DEFINITIONS.items():
            found[name] = {"name": found[name], "options": options.get(name, {}), "version": versions[found[name]]}
        return canonical({**found, "extensions": {}})

    @classmethod
    def from_json(cls, text: bytes, format: int = FORMAT) -> Header:
        """Return the header that `to_json` wrote."""
        try:
            found = json.loads(text)
            if not isinstance(found, dict):
                raise LedgerError(f"a ledger's header must be a JSON object, not {type(found).__name__}")
            if format == 1:
                from cyber0.ledger import format1

                return format1.header(found)
            return cls(**_fields_of(found))
        except RecursionError:
            raise LedgerError("a ledger's header can't be read: its JSON is nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise LedgerError(f"a ledger's header can't be read: {error!r}") from error


def _fields_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a header of format 2 from its JSON."""
    check_format(found.get("format"))
    extensions = found.pop("extensions", None)
    if extensions != {}:  # what changes records, privacy or signatures: a reader that does not know it must stop
        names = ", ".join(map(repr, sorted(extensions))) if isinstance(extensions, dict) else repr(extensions)
        raise LedgerError(f"the ledger uses the extensions {names}, which this cyber0 does not know: update cyber0")
    check_keys(found, {item.name for item in fields(Header)} - {"optimizer_options", "rank"})
    for name in DEFINITIONS:
        stated = found[name]
        if not isinstance(stated, dict) or set(stated) != {"name", "options", "version"}:
            raise _impossible(name, stated, "an object of name, options and version")
        _check_definition(name, stated["name"], stated["version"])
        if name == "optimizer":
            found["optimizer_options"] = stated["options"]
        elif name == "distribution" and DISTRIBUTIONS[stated["name"]].shaped:
            if not isinstance(stated["options"], dict) or set(stated["options"]) != {"rank"}:
                raise _impossible("distribution.options", stated["options"], "an object of rank")
            found["rank"] = stated["options"]["rank"]
        elif stated["options"] != {}:
            raise LedgerError(f"{name} = {stated['name']!r} takes no options, got {reprlib.repr(stated['options'])}")
        found[name] = stated["name"]
    entries, offset = [], 0
    for item in found["layout"]:
        entries.append(LayoutEntry(offset=offset, **item))
        offset += entries[-1].size
    return {**found, "layout": tuple(entries)}


def _check_definition(kind: str, name: object, version: object = _ANY) -> None:
    """Refuse what is not defined here, by its name and version."""
    known = DEFINITIONS[kind]
    if isinstance(name, str) and name in known and (version is _ANY or (_is_whole(version) and version == known[name])):
        return
    shown = reprlib.repr(name) if version is _ANY else f"{reprlib.repr(name)} in version {reprlib.repr(version)}"
    raise LedgerError(
        f"the {kind} {shown} of a ledger's header is unknown here; known are "
        f"{', '.join(f'{n} in version {v}' for n, v in known.items())}: update cyber0"
    )


def check_rounding(rounding: str, layout: Iterable[LayoutEntry], setting: str) -> None:
    """Refuse a rounding that is not the default where no weight would be rounded by it.

    Args:
        rounding: Its name.
        layout: The weights.
        setting: What the user calls it.
    """
    if rounding not in ROUNDINGS:
        raise ConfigError(f"{setting} = {rounding!r} is not a choice; possible are {', '.join(ROUNDINGS)}")
    if rounding != Header.rounding and all(entry.dtype == "float32" for entry in layout):
        raise ConfigError(
            f"{setting} = {rounding!r} is how steps of 16-bit weights are rounded, and all weights are stored in "
            f"float32; leave {setting} out, or store the weights in bfloat16 or float16"
        )


def check_keys(found: dict[str, Any], names: set[str]) -> None:
    """Refuse a header with other keys than these."""
    unknown = set(found) ^ names
    if unknown:
        raise LedgerError(f"a ledger's header has these keys missing or too many: {sorted(unknown)}")


def canonical(tables: dict[str, Any]) -> bytes:
    """Return JSON with sorted keys and no spaces, in ASCII."""
    return json.dumps(tables, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def check_format(format: object) -> None:
    """Refuse a format that this version does not know."""
    if type(format) is not int or format not in (1, FORMAT):
        raise LedgerError(
            f"the ledger is of format {reprlib.repr(format)}, and this cyber0 knows formats 1 and {FORMAT}: update "
            "cyber0"
        )
