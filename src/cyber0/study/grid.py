"""The file of a study: ordinary settings, and a [study] table that lists which of them vary.

    rounds = 400                                   # as in the config of a run

    [study]
    seeds = 3                                      # or a list
    skip = [{ "aggregation.rule" = "mean", "federation.partition" = "by_label" }]

    [study.grid]
    aggregation.rule = ["mean", "median"]          # any key of a config
    federation.attack = ["none", "alie"]
    aggregation.options.tau = [1.0, 2.0]           # an option of what a key names; a path is relative to this file
    byzantine_share = [0.125, 0.25]                # federation.byzantine, and aggregation.beta if nothing else sets it
    size = [                                       # values that belong together
        { label = "small", federation.clients = 12, method.k = 16 },
        { label = "large", federation.clients = 40, method.k = 64 },
    ]

Every config is built, and so checked, before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from cyber0.config import doors
from cyber0.config.files import read_toml
from cyber0.config.keys import SECTIONS, Value, checked_setting, describe, table_of
from cyber0.config.paths import located_tables, paths
from cyber0.config.presets import defaults_for
from cyber0.config.schema import Config
from cyber0.config.suggestions import closest, suggestion
from cyber0.config.tolerance import share_of
from cyber0.errors import ConfigError
from cyber0.federation import build
from cyber0.study.cells import RESULT_COLUMNS, Cell, short, shown
from cyber0.study.judge import Layout

SHARE, SHARE_KEYS = "byzantine_share", ("federation.byzantine", "aggregation.beta")
DEFENCE_KEYS = frozenset({"method.name", "aggregation.rule", "aggregation.before"})
ATTACK_KEY = "federation.attack"
STUDY_KEYS = ("name", "seeds", "grid", "skip", "skip_impossible")
EXAMPLE = "examples/study.toml"
MOST_LISTED = 8  # combinations that an error names

FlatSettings = dict[str, Any]  # section.key -> value


@dataclass(frozen=True)
class Axis:
    """What varies: the label of each value, and the settings it stands for."""

    name: str
    values: Mapping[Value, FlatSettings]

    @property
    def keys(self) -> set[str]:
        """The config keys that some value of this axis sets."""
        return {key for settings in self.values.values() for key in settings}


@dataclass(frozen=True)
class StudyPlan:
    """A study, checked and ready to run."""

    name: str
    cells: list[Cell]
    axes: list[Axis]
    seeds: list[int]
    layout: Layout
    impossible: list[str]
    """The invalid combinations, left out because skip_impossible is set, each with the reason."""
    skipped: int
    """How many combinations the file's `skip` excludes."""
    notes: list[str]
    """What a user may not expect."""

    @property
    def size(self) -> str:
        """The study in one line."""
        counts = [f"{short(axis.name)} ({len(axis.values)})" for axis in self.axes]
        return " x ".join([*counts, f"seed ({len(self.seeds)})"])


def read_plan(path: str | Path) -> StudyPlan:
    """Read and check the file of a study.

    Raises:
        ConfigError: something in it is wrong, or a combination is impossible; nothing has run.
    """
    path = Path(path)
    data = read_toml(path, EXAMPLE)
    table = data.pop("study", None)
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path} has no [study] table, so there is nothing to vary; see {EXAMPLE} for one "
                          f"(for a single run: cyber0 run {path})")  # fmt: skip
    _check_names("study", table, STUDY_KEYS)
    base = _flat(data, "")
    axes = _axes(table.get("grid", {}))
    name = table.get("name", path.stem)
    if not isinstance(name, str) or not name or any(c in name for c in "/\\\0"):
        raise ConfigError(f"study.name = {name!r} must be a valid name for a folder")
    seeds = _seeds(table.get("seeds"), base.get("seed", 0))
    tolerant = table.get("skip_impossible", False)
    if not isinstance(tolerant, bool):
        raise ConfigError(f"study.skip_impossible = {tolerant!r} must be true or false")

    chosen, skipped = _leave_out(_combinations(base, axes), axes, table.get("skip", []))
    cells, impossible = _build(chosen, seeds, path.parent)
    if impossible and not tolerant:
        raise ConfigError(_refusal(impossible))
    if not cells:
        raise ConfigError(
            f"{path} leaves no combination to run: {skipped} are skipped and {len(impossible)} are impossible"
        )
    notes = []
    if SHARE in [axis.name for axis in axes] and SHARE_KEYS[1] in base:
        notes.append(f"{SHARE} leaves {SHARE_KEYS[1]} = {base[SHARE_KEYS[1]]!r} as the file sets it")
    return StudyPlan(name, cells, axes, seeds, _layout(axes), impossible, skipped, notes)


# The parts of the file.


def _flat(table: Mapping[str, Any], where: str) -> FlatSettings:
    """Return the settings of nested tables by their full names, each checked on its own."""
    result: FlatSettings = {}
    for name, value in _entries(table):
        if name in result:
            raise ConfigError(f"{where}{name} is set twice")
        result[name] = checked_setting(name, value)
    return result


def _entries(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a table by full name, whether written as section.key, "section.key" or a nested table."""
    for name, value in table.items():
        if name in SECTIONS and isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", inner_value) for inner, inner_value in value.items())
        else:
            yield name, value


def _axes(grid: Any) -> list[Axis]:
    if not isinstance(grid, Mapping) or not grid:
        raise ConfigError(f"[study.grid] lists what varies, as in: aggregation.rule = [\"mean\", \"median\"]; "
                          f"it is {'empty' if not grid else repr(grid)}")  # fmt: skip
    found = [_axis(name, values) for name, values in _grid_entries(grid)]
    setters: dict[str, str] = {}
    for axis in found:
        if [other.name for other in found].count(axis.name) > 1:
            raise ConfigError(f"study.grid has the axis {axis.name!r} twice")
        for key in axis.keys - ({SHARE_KEYS[1]} if axis.name == SHARE else set()):
            if key in setters:
                raise ConfigError(f"study.grid: {setters[key]!r} and {axis.name!r} both set {key}; keep one of them")
            setters[key] = axis.name
    return found


def _grid_entries(grid: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the axes; each option in a table of options is one, as in aggregation.options.tau = [1.0, 2.0]."""
    for name, values in _entries(grid):
        if table_of(name) is not None and isinstance(values, Mapping):
            yield from ((f"{name}.{option}", listed) for option, listed in values.items())
        else:
            yield name, values


def _axis(name: str, values: Any) -> Axis:
    where = f"study.grid.{name}"
    if name == "seed":
        raise ConfigError("study.grid.seed: seeds are repetitions, not an axis; set study.seeds")
    if isinstance(values, Mapping):
        raise ConfigError(f"{where} is a table; an axis is a list of values, or of tables with a label")
    if not isinstance(values, list):
        raise ConfigError(f"{where} = {values!r} must be a list: an axis has several values")
    if not values:
        raise ConfigError(f"{where} is empty; give it values or leave it out")
    tables = isinstance(values[0], Mapping)
    if any(isinstance(value, Mapping) != tables for value in values):
        raise ConfigError(f"{where} mixes tables with other values; write all of them as tables, or none")
    if tables and (name in RESULT_COLUMNS or name == SHARE):
        raise ConfigError(f"{where}: {name!r} is taken; call the axis something else")
    if not tables and closest(name, [SHARE, *(d.name.rpartition(".")[2] for d in describe())]) == SHARE != name:
        raise ConfigError(f"unknown axis {name!r}; did you mean {SHARE!r}?")
    labelled: dict[Value, FlatSettings] = {}
    for value in values:
        label, settings = _bundle(where, value) if tables else _single(name, value)
        if label in labelled:
            raise ConfigError(f"{where} has {label!r} twice")
        labelled[label] = settings
    return Axis(name, labelled)


def _single(name: str, value: Any) -> tuple[Value, FlatSettings]:
    if name != SHARE:
        value = checked_setting(name, value)
        return value, {name: value}
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(f"study.grid.{SHARE} = {value!r} must be a share of the clients, at least 0 and below 1")
    return float(value), dict.fromkeys(SHARE_KEYS, float(value))


def _bundle(where: str, table: Mapping[str, Any]) -> tuple[str, FlatSettings]:
    settings = _flat({key: value for key, value in table.items() if key != "label"}, f"{where}: ")
    label = table.get("label", ", ".join(map(shown, settings.values())))
    if not isinstance(label, str) or not label.strip():
        raise ConfigError(f"{where}: label = {label!r} must be a name")
    if "seed" in settings:
        raise ConfigError(f"{where}: {label!r} sets the seed, but seeds are repetitions; set study.seeds")
    return label, settings


def _seeds(wanted: Any, first: int) -> list[int]:
    """Return the seeds: the list itself, or that many starting with the file's seed."""
    if wanted is None:
        return [first]
    if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 1:
        wanted = [first + i for i in range(wanted)]
    if not isinstance(wanted, list) or not wanted:
        raise ConfigError(f"study.seeds = {wanted!r} must be a count (at least 1) or a list of seeds")
    seeds = [checked_setting("seed", seed) for seed in wanted]
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"study.seeds = {wanted!r} contains a seed twice")
    return seeds


def _check_names(where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in table:
        if name not in known:
            remedy = suggestion(name, known)
            if not closest(name, known) and (name in SECTIONS or name in {d.name for d in describe()}):
                remedy = f"settings of the runs belong outside [{where}], those that vary in [{where}.grid]"
            raise ConfigError(f"unknown key {where}.{name}; {remedy}")


# The combinations.


@dataclass(frozen=True)
class _Combination:
    axes: dict[str, Value]
    settings: FlatSettings

    @property
    def label(self) -> str:
        return ", ".join(f"{name} = {shown(value)}" for name, value in self.axes.items())


def _combinations(base: FlatSettings, axes: list[Axis]) -> Iterator[_Combination]:
    """Yield every point of the grid, the last axis fastest."""
    separate_beta = SHARE_KEYS[1] in base or any(SHARE_KEYS[1] in axis.keys for axis in axes if axis.name != SHARE)
    for labels in product(*(axis.values for axis in axes)):
        settings = dict(base)
        for axis, label in zip(axes, labels, strict=True):
            if axis.name != SHARE:
                settings |= axis.values[label]
        names = [axis.name for axis in axes]
        if SHARE in names:  # last, because it needs to know how many clients there are
            share = float(labels[names.index(SHARE)])
            settings[SHARE_KEYS[0]] = share_of(share, _value(settings, "federation.clients"))
            if not separate_beta:
                settings[SHARE_KEYS[1]] = share
        yield _Combination(dict(zip(names, labels, strict=True)), settings)


def _value(settings: FlatSettings, key: str) -> Any:
    """Return the value of a key, or its default."""
    return settings[key] if key in settings else defaults_for(_tables(settings)).get(key)


def _tables(settings: FlatSettings) -> dict[str, Any]:
    """Return settings by full name as the tables of a config."""
    tables: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        if table_of(section) is not None:
            section, _, options = section.rpartition(".")
            key, value = options, {**tables.get(section, {}).get(options, {}), key: value}
        (tables.setdefault(section, {}) if section else tables)[key] = value
    return tables


def _leave_out(
    combinations: Iterator[_Combination], axes: list[Axis], conditions: Any
) -> tuple[list[_Combination], int]:
    """Return the combinations that no condition of `skip` matches, and how many are skipped."""
    everything = list(combinations)
    if not isinstance(conditions, list) or not all(isinstance(c, Mapping) and c for c in conditions):
        raise ConfigError(
            f'study.skip = {conditions!r} must be a list of tables, as in [{{"aggregation.rule" = "mda"}}]'
        )
    out: set[int] = set()
    for raw in conditions:
        condition = _condition(raw, axes)
        met = {i for i, c in enumerate(everything) if all(_has(c, key, some) for key, some in condition.items())}
        if not met:
            raise ConfigError(f"study.skip: no combination has {dict(raw)!r}; correct or remove this condition")
        out |= met
    return [c for i, c in enumerate(everything) if i not in out], len(out)


def _condition(raw: Mapping[str, Any], axes: list[Axis]) -> dict[str, list[Any]]:
    """Return the values that the condition lists, for each of its axes or keys."""
    by_name = {axis.name: axis for axis in axes}
    result: dict[str, list[Any]] = {}
    for name, wanted in _entries(raw):
        some = wanted if isinstance(wanted, list) else [wanted]
        for one in some:
            if not isinstance(one, Value):
                raise ConfigError(f"study.skip: {name} = {wanted!r} must be a value or a list of values")
            if name not in by_name:
                checked_setting(name, one)
            elif one not in by_name[name].values:
                possible = ", ".join(map(shown, by_name[name].values))
                raise ConfigError(f"study.skip: {name} = {one!r} is not in the grid; its values are {possible}")
        result[name] = some
    return result


def _has(combination: _Combination, name: str, values: list[Any]) -> bool:
    own = combination.axes[name] if name in combination.axes else _value(combination.settings, name)
    return own in values


def _build(combinations: list[_Combination], seeds: list[int], folder: Path) -> tuple[list[Cell], list[str]]:
    """Return the cells, and the impossible combinations with the reason; paths are relative to the folder."""
    cells: list[Cell] = []
    impossible: list[str] = []
    for combination in combinations:
        try:
            config = Config.from_dict(located_tables(_tables(combination.settings), folder))
            named = paths(config)
            if "task.name" in named:
                doors.check(named.pop("task.name"), "task.name")  # imported by the workers: this process needs no torch
            if named:
                build.resolve(config)
        except ConfigError as error:
            impossible.append(f"{combination.label}: {error}")
        else:
            cells += [Cell(combination.axes, replace(config, seed=seed)) for seed in seeds]
    return cells, impossible


def _refusal(impossible: list[str]) -> str:
    lines = [f"\n  {line}" for line in impossible[:MOST_LISTED]]
    if len(impossible) > MOST_LISTED:
        lines.append(f"\n  and {len(impossible) - MOST_LISTED} more")
    one = len(impossible) == 1
    return (
        f"{len(impossible)} combination{'' if one else 's'} of the grid {'is' if one else 'are'} impossible:"
        f"{''.join(lines)}\nchange the grid, exclude them with study.skip, or set study.skip_impossible = true"
    )


def _layout(axes: list[Axis]) -> Layout:
    """Return which axes are attacks, which are defences, and which are the circumstances of both."""
    attacks = [axis.name for axis in axes if ATTACK_KEY in axis.keys]
    defences = [axis.name for axis in axes if axis.keys & DEFENCE_KEYS and axis.name not in attacks]
    rest = [axis.name for axis in axes if axis.name not in (*attacks, *defences)]
    return Layout(tuple(defences), tuple(attacks), tuple(rest))
