"""The settings of a run: one TOML file, checked as a whole before anything runs.

    config = load("examples/mnist.toml", overrides=["method.k=16", "aggregation.rule=median"])
    config.method.k                  # 16
    Path("config.toml").write_text(to_toml(config))

Every section checks itself when it is built, so a Config that exists is a Config that can run; what it names by a path
is imported later, by whoever runs it. A setting is declared once, by `key`: its default, its limits and the line that
explains it to a reader. The names that can be chosen live in choices.py and registry.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from cyber0.config import choices, doors
from cyber0.config.choices import Choices
from cyber0.config.devices import parse_device
from cyber0.config.keys import (
    Checked,
    Table,
    Value,
    as_recorded,
    checked_value,
    closest,
    comment,
    default_of,
    full_name,
    is_recorded,
    is_table,
    key,
    range_of,
    settings,
    table,
    toml_value,
)
from cyber0.config.registry import ATTACKS, PARTITIONS, PRE_AGGREGATIONS, RULES, SCHEDULES, Entry, Registry
from cyber0.config.tolerance import PAIRWISE_ROWS, invited_count, probability_of_too_many_liars, share_of, tolerated
from cyber0.errors import ConfigError
from cyber0.storage import WEIGHTS

INDEX_LIMIT = 2**24  # directions, clients: the index of a counter stream has 24 bits
ROUND_LIMIT = 2**32 - 1  # a round is one 32-bit word of the counter, and so is their number in a record
RISK_LIMIT = 0.01  # share of rounds with more liars than the rule bears that is run without being asked to
OWN_RULES = {"cyber0": "trimmed_mean", "trimmed_mean": "trimmed_mean", "krum": "krum"}  # of the others: mean
WITHOUT_CLASSES = ("ridge", "logistic")  # tasks whose targets are not numbers of classes
FLOAT32_TINY, FLOAT32_MAX = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


# Defaults that depend on another setting: the paper's settings of its language tasks (its Table 5).
_TEXT: dict[str, Value] = {
    "evaluate_every": 1000, "task.model": "FacebookAI/roberta-large", "task.samples": 512, "rounds": 20_000,
    "federation.clients": 12, "federation.byzantine": 3, "method.k": 1, "method.lr": 1e-6,
}  # fmt: skip
_EIGHT: dict[str, Value] = {"federation.clients": 8, "federation.byzantine": 2}
DEPENDENT_DEFAULTS: dict[str, dict[str, dict[str, Value]]] = {
    "task.name": {
        "sst2": _TEXT | _EIGHT, "snli": _TEXT, "trec": _TEXT | {"rounds": 40_000},
        "text": _TEXT | _EIGHT | {"task.samples": 0},
    },
}  # fmt: skip


def _by_path(name: str) -> bool:
    """Tell whether a name is not looked up among the registered ones: it is a path, or somebody else's."""
    return is_recorded() or doors.is_path(name)


@dataclass(frozen=True)
class TaskConfig(Checked):
    """What is learned, and from which data."""

    section: ClassVar[str] = "task"
    name: str = key(
        "mnist", "what is learned; your own: file.py:Name or package.module:Name",
        choices=choices.TASKS, own=doors.is_own,
    )  # fmt: skip
    data: str = key("", "folder with the data; empty: fetched once and cached")
    samples: int = key(
        0, "training samples in all, as equal as possible per class; 0: all there are", limits="at least 0",
        valid=lambda v: v >= 0,
    )  # fmt: skip
    dtype: str = key("float32", "how weights are stored", choices=choices.DTYPES)
    weights: str = key("", "safetensors file with the weights to start from; empty: the task's own")
    model: str = key("", "language model: a name on the Hugging Face hub, a folder, or a .gguf file")
    template: str = key("", "prompt of a text task, as '{text} It was {mask}.'; empty: the task's own")
    label_words: str = key("", "the word of each label, as '0=terrible, 1=great'; empty: the task's own")
    adapter: str = key("none", "which weights of a language model are trained", choices=choices.ADAPTERS)
    lora_rank: int = key(8, "rank of adapter lora", limits="at least 1", valid=lambda v: v >= 1)
    prefix_length: int = key(5, "virtual tokens of adapter prefix", limits="at least 1", valid=lambda v: v >= 1)
    options: dict[str, Any] = table("of your own task: the keyword arguments of its constructor")

    def check_together(self) -> None:
        text = self.name in choices.TEXT_TASKS
        if self.options and not doors.is_own(self.name):
            raise ConfigError(
                f"task.options = {self.options!r} is for tasks of your own, and task.name = {self.name!r} takes none; "
                "leave task.options out"
            )
        if self.data and doors.is_own(self.name):
            raise ConfigError(
                f"task.data = {self.data!r} is for the tasks of cyber0; give a task of your own a constructor that "
                "takes data, and set task.options.data"
            )
        if self.data and not text and self.name not in choices.DATASETS:
            raise ConfigError(
                f"task.data = {self.data!r} can't be used with task.name = {self.name!r}, which draws its own samples; "
                "leave task.data empty"
            )
        of_text = {"model": self.model, "template": self.template, "label_words": self.label_words}
        for name, value in {**of_text, "adapter": "" if self.adapter == "none" else self.adapter}.items():
            if value and not text:
                raise ConfigError(
                    f"task.{name} = {value!r} is for text tasks; set task.name to {', '.join(choices.TEXT_TASKS)}"
                )


@dataclass(frozen=True)
class FederationConfig(Checked):
    """Who takes part, who lies, and who holds which data."""

    section: ClassVar[str] = "federation"
    clients: int = key(12, "m, how many clients there are", limits="1 to 2^24", valid=lambda v: 1 <= v <= INDEX_LIMIT)
    byzantine: int = key(3, "how many of the clients lie", limits="at least 0", valid=lambda v: v >= 0)
    attack: str = key("full_knowledge", "what they send", choices=ATTACKS, own=_by_path)
    attack_options: Table = table("what the attack takes, as {scale = 2.0}")
    attack_reading: str = key(
        "accepted", "alias of attack_options.reading: how the paper's attacks are read", choices=choices.ATTACK_READINGS
    )
    attack_sign: str = key(
        "honest",
        "alias of attack_options.sign_from: whose sign Fang et al.'s attacks work against",
        choices=choices.ATTACK_SIGNS,
    )
    attack_strength: float = key(
        0.0,
        "alias of the option that says how strong an attack is (scale, epsilon, z, b, reach); 0: its default",
        limits="at least 0",
        valid=lambda v: v >= 0,
    )
    partition: str = key("iid", "how samples are dealt to clients", choices=PARTITIONS, own=_by_path)
    partition_options: Table = table("what the partition takes, as {alpha = 0.1}")
    alpha: float = key(
        0.5,
        "alias of partition_options.alpha, of dirichlet; small: few labels a client, large: nearly iid",
        limits="1e-6 to 1e9",
        valid=lambda v: 1e-6 <= v <= 1e9,
    )
    shards: int = key(
        2,
        "alias of partition_options.per_client, of shards: how many each client gets",
        limits="at least 1",
        valid=lambda v: v >= 1,
    )
    similarity: float = key(
        0.5,
        "alias of partition_options.similarity, of gamma: share of the samples dealt evenly; 1: iid, 0: by_label",
        limits="0 to 1",
        valid=lambda v: 0 <= v <= 1,
    )
    participation: float = key(
        1.0, "share of the clients invited each round", limits="above 0, at most 1", valid=lambda v: 0 < v <= 1
    )
    accept_risk: bool = key(False, "run though over 1 % of the rounds may hold more liars than the rule bears")

    @property
    def invited(self) -> int:
        """How many clients are invited to a round."""
        return invited_count(self.clients, self.participation)

    @property
    def partition_title(self) -> str:
        """The partition with the setting that is its own, if it has one."""
        own: dict[str, Table] = {"dirichlet": {"alpha": self.alpha}, "shards": {"per_client": self.shards},
                                 "gamma": {"similarity": self.similarity}}  # fmt: skip
        options = own.get(self.partition, {}) | self.partition_options
        if self.partition == "shards":
            return f"shards ({options['per_client']} each)"
        said = ", ".join(f"{k} = {v:g}" if isinstance(v, float) else f"{k} = {v}" for k, v in options.items())
        return f"{doors.short(self.partition)} ({said})" if said else doors.short(self.partition)

    @property
    def attack_arguments(self) -> Table:
        """The options of the attack, those set by their old names included."""
        aliases = {"reading": "attack_reading", "sign_from": "attack_sign"}
        if self.attack_strength > 0:
            entry = _built_in(ATTACKS, self.attack)
            if entry is None or not entry.traits["strength"]:
                having = [name for name in ATTACKS if ATTACKS.entry(name).traits["strength"]]
                raise ConfigError(
                    f"federation.attack = {self.attack!r} takes no strength, but federation.attack_strength = "
                    f"{self.attack_strength!r}; set it to 0 (attacks that take one are {', '.join(having)})"
                )
            aliases[entry.traits["strength"]] = "attack_strength"
        return self._merged(ATTACKS, self.attack, "attack_options", aliases)

    @property
    def partition_arguments(self) -> Table:
        """The options of the partition, those set by their old names included."""
        aliases = {"alpha": "alpha", "per_client": "shards", "similarity": "similarity"}
        return self._merged(PARTITIONS, self.partition, "partition_options", aliases)

    def _merged(self, registry: Registry, name: str, table: str, aliases: Mapping[str, str]) -> Table:
        """Return a table of options with those that were set by an alias; refuse two values for one option."""
        options: Table = dict(getattr(self, table))
        for option, alias in aliases.items():
            value = getattr(self, alias)
            if value == default_of(_setting("federation", alias)):
                continue
            entry = _built_in(registry, name)
            if entry is not None and option in entry.options and options.setdefault(option, value) != value:
                raise ConfigError(
                    f"federation.{alias} = {value!r} is an alias of federation.{table}.{option}, which is "
                    f"{options[option]!r}; set one of them"
                )
        return options

    def check_together(self) -> None:
        if self.byzantine >= self.clients:
            raise ConfigError(
                f"federation.byzantine = {self.byzantine} leaves no honest client among federation.clients = "
                f"{self.clients}; set federation.byzantine to at most {self.clients - 1}"
            )
        if is_recorded():
            return
        _try(ATTACKS, self.attack, self.attack_arguments)
        _try(PARTITIONS, self.partition, self.partition_arguments)


@dataclass(frozen=True)
class MethodConfig(Checked):
    """How the loss is measured and the weights are moved."""

    section: ClassVar[str] = "method"
    name: str = key("cyber0", "the algorithm", choices=choices.METHODS)
    k: int = key(
        64, "directions a step; for cyber0 the numbers each client sends", limits="at least 1", valid=lambda v: v >= 1
    )
    mu: float = key(
        0.001,
        "length of the probing step; only two_point uses it",
        limits="at least 0",
        valid=lambda v: v >= 0,
    )
    lr: float = key(0.01, "learning rate", limits="above 0", valid=lambda v: v > 0)
    lr_schedule: str = key("constant", "the learning rate over the run", choices=SCHEDULES, own=_by_path)
    lr_options: Table = table("what the schedule takes")
    batch_size: int = key(64, "samples a client draws each step", limits="at least 1", valid=lambda v: v >= 1)
    local_epochs: int = key(1, "E, local steps of a client each round", limits="at least 1", valid=lambda v: v >= 1)
    local_memory: str = key("copy", "how a client undoes its local steps", choices=choices.LOCAL_MEMORIES)
    distribution: str = key("gaussian", "what directions look like", choices=choices.DISTRIBUTIONS)
    estimator: str = key("two_point", "how the slope along a direction is measured", choices=choices.ESTIMATORS)
    projection_radius: float = key(
        0.0, "keep the weights in a ball of this radius; 0: no limit", limits="at least 0", valid=lambda v: v >= 0
    )

    def check_together(self) -> None:
        if not is_recorded():
            _try(SCHEDULES, self.lr_schedule, self.lr_options)
        if self.estimator == "two_point" and not FLOAT32_TINY <= self.mu <= FLOAT32_MAX:
            remedy = 'set method.estimator = "gradient" or "forward"' if self.mu < 1 else "set method.mu = 0.001"
            raise ConfigError(
                f'method.mu = {self.mu!r} can\'t be used with method.estimator = "two_point", which divides by it in '
                f"32-bit numbers; {remedy}"
            )
        if self.local_memory == "regenerate" and self.local_epochs > 1 and self.estimator != "two_point":
            raise ConfigError(
                f'method.local_memory = "regenerate" works with method.estimator = "two_point" alone, not with '
                f'{self.estimator!r}; set method.local_memory = "copy"'
            )
        if self.k * self.local_epochs >= INDEX_LIMIT:
            raise ConfigError(
                f"method.k = {self.k} times method.local_epochs = {self.local_epochs} is "
                f"{self.k * self.local_epochs} directions a round; lower one of them to stay below {INDEX_LIMIT}"
            )


@dataclass(frozen=True)
class AggregationConfig(Checked):
    """How the federator turns everybody's numbers into one decision."""

    section: ClassVar[str] = "aggregation"
    rule: str = key("", "robust mean of the reports; empty: the method's own", choices=RULES, own=_by_path)
    options: Table = table("what the rule takes, as {tau = 2.0}; beta is a setting of its own")
    before: str = key("none", "what is done to the reports before", choices=PRE_AGGREGATIONS)
    beta: float = key(
        0.25,
        "share of liars to bear: floor(beta m) are trimmed at each end",
        limits="at least 0, below 0.5",
        valid=lambda v: 0 <= v < 0.5,
    )

    def trimmed(self, invited: int) -> int:
        """Return b = floor(beta * invited), how many are trimmed at each end."""
        return share_of(self.beta, invited)

    def check_invited(self, invited: int) -> None:
        """Refuse a rule that can't work with so many invited clients, more than twice as many as it trims."""
        if is_recorded() or (self.rule in ("mean", "trimmed_mean") and self.before == "none" and not self.options):
            return  # these need no more, and nothing is imported for the default run
        own = _built_in(RULES, self.rule) is None  # by a path, and not imported yet: it needs what most rules need
        rule = RULES.make("median" if own else self.rule, None if own else self.options, beta=self.beta)
        rule = PRE_AGGREGATIONS.make(self.before, rule=rule, beta=self.beta, seed=0)
        b = tolerated(rule.beta, invited)
        try:
            needed = rule.required(b)
        except ConfigError as error:
            raise ConfigError(
                f"aggregation.rule = {self.rule!r} with aggregation.beta = {self.beta!r}: {error}"
            ) from None
        remedy = "lower aggregation.beta or invite more clients"
        if any(step.size > 1 for step in rule.steps):
            remedy = f'{remedy}, or set aggregation.before = "none"'
        if needed > invited:
            raise ConfigError(
                f"aggregation.rule = {self.rule!r} with aggregation.before = {self.before!r} needs {needed} reports "
                f"to withstand the {b} liars of aggregation.beta = {self.beta!r}, and {invited} clients are invited; "
                f"{remedy}"
            )
        compares = not own and RULES.entry(self.rule).traits["pairwise"]
        if invited > PAIRWISE_ROWS and (compares or PRE_AGGREGATIONS.entry(self.before).traits["pairwise"]):
            raise ConfigError(
                f"aggregation.rule = {self.rule!r} with aggregation.before = {self.before!r} compares every pair of "
                f"{invited} invited clients, and can do so for {PAIRWISE_ROWS}; lower federation.participation or set "
                'aggregation.rule = "trimmed_mean" with aggregation.before = "none" or "bucketing"'
            )


@dataclass(frozen=True)
class ServeConfig(Checked):
    """A federation over the network."""

    section: ClassVar[str] = "serve"
    deadline_s: float = key(60.0, "seconds to wait for reports", limits="above 0", valid=lambda v: v > 0)
    quorum: int = key(1, "reports without which a round is abandoned", limits="at least 1", valid=lambda v: v >= 1)
    codec: str = key("float32", "how numbers travel", choices=choices.CODECS)
    seed_mode: str = key("shared", "what directions are drawn from", choices=choices.SEED_MODES)
    durability: str = key("always", "when the ledger is forced to disk", choices=choices.DURABILITIES)
    keep_reports: bool = key(False, "keep every report in reports.bin, for cyber0 verify --decisions")
    digest_every: int = key(
        100, "rounds between comparisons of the weights' digests; 0: never", limits="at least 0", valid=lambda v: v >= 0
    )


@dataclass(frozen=True)
class Config(Checked):
    """The settings of a run; the defaults are the default run."""

    seed: int = key(0, "everything random follows from it", limits="0 to 2^64 - 1", valid=lambda v: 0 <= v < 2**64)
    rounds: int = key(400, "rounds to train", limits="0 to 2^32 - 1", valid=lambda v: 0 <= v <= ROUND_LIMIT)
    device: str = key("cpu", "where losses are computed", choices=choices.DEVICES, parse=parse_device)
    evaluate_every: int = key(10, "rounds between evaluations", limits="at least 1", valid=lambda v: v >= 1)
    task: TaskConfig = field(default_factory=TaskConfig)
    federation: FederationConfig = field(default_factory=FederationConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)

    def check_together(self) -> None:
        for name, kind in SECTIONS.items():
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} must be a {kind.__name__}, not {getattr(self, name)!r}")
        if not self.aggregation.rule:
            with as_recorded():  # the name is ours: nothing is imported to look it up
                object.__setattr__(self, "aggregation", replace(self.aggregation, rule=own_rule(self.method.name)))
        self._check_task()
        self._check_method()
        invited, b = self.federation.invited, self.aggregation.trimmed(self.federation.invited)
        if 2 * b >= invited:
            raise ConfigError(
                f"aggregation.beta = {self.aggregation.beta!r} trims {b} numbers at each end of {invited} invited "
                "clients, which leaves none; lower aggregation.beta or invite more clients"
            )
        self.aggregation.check_invited(invited)
        if self.serve.quorum > invited:
            raise ConfigError(
                f"serve.quorum = {self.serve.quorum} can't be reached by {invited} invited clients; "
                f"set serve.quorum to at most {invited}"
            )
        # The plain mean bears no liar by design, and who invites everybody sees how many lie: those are not refused.
        refusable = self.aggregation.rule != "mean" and invited < self.federation.clients
        if refusable and self.risk > RISK_LIMIT and not self.federation.accept_risk:
            raise ConfigError(
                f"with federation.byzantine = {self.federation.byzantine} of {self.federation.clients} clients, "
                f"{self.risk:.1%} of the samples of {invited} hold more than the {b} liars that aggregation.beta = "
                f"{self.aggregation.beta!r} bears; raise federation.participation or aggregation.beta, or set "
                "federation.accept_risk = true"
            )

    def _check_task(self) -> None:
        """Refuse what the task has not."""
        if self.federation.attack == "label_flip" and self.task.name in WITHOUT_CLASSES:
            raise ConfigError(
                'federation.attack = "label_flip" turns class l into C - 1 - l, and '
                f"task.name = {self.task.name!r} has no such classes; choose another attack or task"
            )

    def _check_method(self) -> None:
        """Refuse what contradicts the method."""
        name, rule, federation = self.method.name, self.aggregation.rule, self.federation
        if OWN_RULES.get(name) == name != rule:
            raise ConfigError(
                f"method.name = {name!r} is federated averaging with that rule, and aggregation.rule = {rule!r} is "
                f'another; set aggregation.rule = {name!r}, or method.name = "fedavg" for any rule'
            )
        if name == "mezo":
            self._check_central()
        if self.serve.keep_reports and name not in ("cyber0", "mezo"):
            raise ConfigError(
                f"serve.keep_reports = true keeps k numbers a report, and method.name = {name!r} sends d of them; set "
                "serve.keep_reports = false"
            )
        directions = federation.clients * self.method.local_epochs * self.method.k
        if name == "fedzo" and directions > INDEX_LIMIT:
            raise ConfigError(
                f'method.name = "fedzo" has directions of its own for every client, and federation.clients = '
                f"{federation.clients} times method.local_epochs = {self.method.local_epochs} times method.k = "
                f"{self.method.k} is {directions} directions a round; lower one of them to stay within {INDEX_LIMIT}"
            )

    def _check_central(self) -> None:
        """Refuse what only a federation has."""
        federation, aggregation = self.federation, self.aggregation
        central = 'method.name = "mezo" trains on one machine that has all the samples'
        if federation.byzantine and federation.attack != "none":
            raise ConfigError(
                f"{central}, so nobody lies; set federation.byzantine = 0 (it is {federation.byzantine}, with "
                f"federation.attack = {federation.attack!r})"
            )
        if federation.participation < 1:
            raise ConfigError(
                f"{central}, so nobody is sampled; set federation.participation = 1 (it is {federation.participation})"
            )
        if (aggregation.rule, aggregation.before) != ("mean", "none"):
            raise ConfigError(
                f'{central}, so there is nothing to combine; set aggregation.rule = "mean" and aggregation.before = '
                f'"none" (they are {aggregation.rule!r} and {aggregation.before!r})'
            )

    @cached_property
    def risk(self) -> float:
        """The probability that a round holds more liars than the rule bears; 0 or 1 where all are invited."""
        federation, invited = self.federation, self.federation.invited
        return probability_of_too_many_liars(federation.clients, federation.byzantine, invited, self.borne)

    @property
    def borne(self) -> int:
        """How many liars a round the rule bears: b, and none for the plain mean."""
        return 0 if self.aggregation.rule == "mean" else self.aggregation.trimmed(self.federation.invited)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build a config from nested tables; what is absent takes its default, what is unknown is refused."""
        data = values = _with_defaults(data)
        for name, value in list(data.items()):
            if name not in SECTIONS:
                _refuse_unknown("", name, value)
                if "." in name:
                    section, _, key = name.rpartition(".")
                    raise ConfigError(
                        f"{name!r} (= {value!r}) belongs in its section: {{{section!r}: {{{key!r}: ...}}}}"
                    )
                continue
            kind = SECTIONS[name]
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name} = {value!r} must be a table; its keys are {_names(kind)}")
            for inner, inner_value in value.items():
                _refuse_unknown(name, inner, inner_value)
            values[name] = kind(**value)
        return cls(**values)

    @classmethod
    def recorded(cls, data: Mapping[str, Any]) -> Self:
        """Build a config from what another run recorded, as in a ledger's header; nothing that it names is imported."""
        with as_recorded():
            return cls.from_dict(data)

    def with_overrides(self, overrides: Iterable[str]) -> Self:
        """Return a config with some `section.key=value` settings replaced, checked as a whole.

        What stands at its default follows where the default goes: another task brings its own. Where the rule is the
        method's own, it stays that of the method, also of another one.
        """
        values = to_dict(self)
        if self.aggregation.rule == own_rule(self.method.name):
            values["aggregation"]["rule"] = ""
        return type(self).from_dict(_apply(_without_defaults(values), overrides))


SECTIONS: dict[str, type[Checked]] = {
    kind.section: kind for kind in (TaskConfig, FederationConfig, MethodConfig, AggregationConfig, ServeConfig)
}


DOORS = (("task", "name"), ("aggregation", "rule"), ("federation", "attack"), ("federation", "partition"),
         ("method", "lr_schedule"))  # fmt: skip
"""The settings that may name an object by its path."""


class KeyDescription(NamedTuple):
    """One setting as shown to a reader."""

    name: str
    default: Any
    text: str
    limits: str
    choices: Choices


def _built_in(registry: Registry, name: str) -> Entry | None:
    """Return what is registered under a name; None for a path, and for what only the config of others names."""
    return registry.entry(name) if name in registry else None


def _try(registry: Registry, name: str, options: Table) -> None:
    """Refuse options that a registered factory does not take; what a path names is imported later."""
    if options and name in registry:  # without options nothing can be wrong, and nothing is imported
        registry.make(name, options)


def own_rule(method: str) -> str:
    """Return the rule that a method goes with unless another is asked for."""
    return OWN_RULES.get(method, "mean")


def describe() -> list[KeyDescription]:
    """Return every key that a config can have, in the order of the file."""
    kinds: list[type[Checked]] = [Config, *SECTIONS.values()]
    return [
        KeyDescription(full_name(kind.section, f.name), default_of(f), f.metadata["text"], *range_of(f))
        for kind in kinds
        for f in settings(kind)
    ]


def for_header(config: Config) -> Config:
    """Return the settings as a ledger's header has them: "mezo" is a federation of one client, whatever is set."""
    if config.method.name != "mezo":
        return config
    alone = replace(config.federation, clients=1, byzantine=0, partition="iid")
    return replace(config, federation=alone, serve=replace(config.serve, quorum=1))


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Read a TOML file (none: the defaults), replace some settings by `section.key=value`, and check the result."""
    folder = Path.cwd() if path is None else Path(path).parent
    data = {} if path is None else located_tables(read_toml(Path(path)), folder)
    if "study" in data:
        raise ConfigError(f"{path} describes a study of many runs; run it by: cyber0 study {path}")
    return Config.from_dict(located_tables(_apply(data, overrides), Path.cwd()))


def located_tables(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the tables with the whole paths of the user's files, which are relative to a folder.

    task.model and task.data stay as they are: they are relative to the working directory, and may be names on a hub.
    """
    return _with_weights(with_paths(data, partial(doors.located, folder=folder)), partial(located_file, folder=folder))


def paths(config: Config) -> dict[str, str]:
    """Return what a config names by a path, by the name of its setting."""
    named = {full_name(section, name): getattr(getattr(config, section), name) for section, name in DOORS}
    return {key: path for key, path in named.items() if doors.is_path(path)}


def located(config: Config) -> Config:
    """Return the config with the absolute paths of the user's files; relative ones start at the working directory."""
    return Config.recorded(located_tables(to_dict(config), Path.cwd()))


def located_file(path: str, folder: Path) -> str:
    """Return the whole path of a file that is relative to a folder; symbolic links stay, as does the empty path."""
    return os.path.abspath(folder / Path(path).expanduser()) if path else path


def _relative_file(path: str, folder: Path) -> str:
    """Return the path of a file as it is written in a file of that folder."""
    if not os.path.isabs(path):
        return path
    try:
        return Path(os.path.relpath(path, folder.absolute())).as_posix()
    except ValueError:  # on another drive of Windows
        return path


def _with_weights(data: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return the tables of a config with the path of task.weights changed."""
    section = data.get("task")
    if not isinstance(section, Mapping) or not isinstance(section.get("weights"), str):
        return dict(data)
    return {**data, "task": {**section, "weights": change(section["weights"])}}


def with_paths(data: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return the tables of a config with the paths of objects changed."""
    result = {name: dict(value) if isinstance(value, Mapping) else value for name, value in data.items()}
    for section, name in DOORS:
        found = result.get(section)
        if isinstance(found, dict) and isinstance(found.get(name), str):
            found[name] = change(found[name])
    return result


def agreed(config: Config) -> dict[str, Any]:
    """Return the config as a header keeps it: files of the user's by their names alone, wherever they lie.

    Of task.weights it says no more than that there is such a file: what is in it, the digests of the weights say.
    """
    return _with_weights(with_paths(to_dict(config), doors.short), lambda path: path and WEIGHTS)


def checked_setting(name: str, value: Any) -> Any:
    """Return the value of one key or option, in the key's type; refuse what is unknown or impossible by itself."""
    section, _, key = name.rpartition(".")
    options = table_of(section)
    if options is not None:
        return checked_value(section, options, {key: value})[key]
    _refuse_unknown(section, key, value)
    return checked_value(name, _setting(section, key), value)


def to_dict(config: Config) -> dict[str, Any]:
    """Return the config as nested tables of plain values; tables of options and task.weights are left out if empty.

    So a new one of them changes neither the header nor the identity of runs that don't use it.
    """
    result = {
        name: {key: one for key, one in value.items() if one != {}} if isinstance(value, dict) else value
        for name, value in asdict(config).items()
    }
    if not config.task.weights:
        del result["task"]["weights"]
    return result


def to_toml(config: Config, folder: Path | None = None) -> str:
    """Write a config with every key and what it means; reading it back gives the same config.

    Written for a folder, paths of objects are relative to it.
    """
    if folder is not None:
        tables = with_paths(to_dict(config), partial(doors.relative, folder=folder))
        config = Config.recorded(_with_weights(tables, partial(_relative_file, folder=folder)))
    lines: list[str] = []
    for name, section in (("", config), *((name, getattr(config, name)) for name in SECTIONS)):
        lines += ["", f"[{name}]"] if name else []
        for f in settings(type(section)):
            setting = f"{f.name} = {toml_value(getattr(section, f.name))}"
            lines.append(f"{setting:<31} # {comment(f)}")
    return "\n".join(lines) + "\n"


def read_toml(path: Path, example: str = "examples/mnist.toml") -> dict[str, Any]:
    """Return the tables of a TOML file; `example` is what is pointed to where there is no such file."""
    import tomllib

    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}; {example} shows what one looks like") from None
    except OSError as error:
        raise ConfigError(f"the config file {path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _apply(data: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return the tables with `section.key=value` settings replaced."""
    result = {name: dict(value) if isinstance(value, Mapping) else value for name, value in data.items()}
    for override in overrides:
        name, equals, text = (part.strip() for part in override.partition("="))
        if not equals:
            raise ConfigError(f"the override {override!r} has no value; write it as section.key=value")
        section, _, key = name.rpartition(".")
        if table_of(section) is not None:  # one option: section.options.name=value
            section, _, options = section.rpartition(".")
            value = {**_options_in(result, section, options), key: _read_value(text)}
            key = options
        else:
            _refuse_unknown(section, key, text)
            value = _override_value(_setting(section, key), text)
        target = result.setdefault(section, {}) if section else result
        if isinstance(target, dict):  # from_dict refuses what is not a table
            target[key] = value
    return result


def overridden(overrides: Iterable[str]) -> set[str]:
    """Return the names of the settings that `section.key=value` settings replace."""
    return {override.partition("=")[0].strip() for override in overrides}


def table_of(name: str) -> Field[Any] | None:
    """Return the setting of that full name, if it is a table of options."""
    section, _, key = name.rpartition(".")
    if section not in SECTIONS:
        return None
    return next((f for f in settings(SECTIONS[section]) if f.name == key and is_table(f)), None)


def _options_in(data: Mapping[str, Any], section: str, name: str) -> dict[str, Any]:
    table = data.get(section, {})
    found = table.get(name, {}) if isinstance(table, Mapping) else {}
    return dict(found) if isinstance(found, Mapping) else {}


def _with_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables with those defaults filled in that depend on another setting, where it is set."""
    result = {name: dict(value) if isinstance(value, Mapping) else value for name, value in data.items()}
    for full, value in _dependent_defaults(data).items():
        section, _, key = full.rpartition(".")
        target = result.setdefault(section, {}) if section else result
        if isinstance(target, dict):
            target.setdefault(key, value)
    return result


def defaults_for(data: Mapping[str, Any]) -> dict[str, Value]:
    """Return the default of every setting, by its full name, given the settings that defaults depend on."""
    method = data.get("method", {})
    name = method.get("name", "cyber0") if isinstance(method, Mapping) else "cyber0"
    return {d.name: d.default for d in describe()} | _dependent_defaults(data) | {"aggregation.rule": own_rule(name)}


def _without_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables without what stands at its default, but for the settings that defaults depend on."""
    defaults = {d.name: d.default for d in describe()} | _dependent_defaults(data)

    def kept(section: str, table: Mapping[str, Any]) -> dict[str, Any]:
        names = {key: full_name(section, key) for key in table}
        return {key: value for key, value in table.items() if isinstance(value, Mapping)
                or names[key] in DEPENDENT_DEFAULTS or value != defaults[names[key]]}  # fmt: skip

    return kept("", {name: kept(name, value) if isinstance(value, Mapping) else value for name, value in data.items()})


def _dependent_defaults(data: Mapping[str, Any]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for full, cases in DEPENDENT_DEFAULTS.items():
        section, _, key = full.rpartition(".")
        chosen = data.get(section, {})
        found |= cases.get(str(chosen.get(key)), {}) if isinstance(chosen, Mapping) else {}
    return found


def _override_value(f: Field[Any], text: str) -> Any:
    """Read a value as TOML would; what is not quoted where a string is due is taken as it stands."""
    value = _read_value(text)
    return text if isinstance(default_of(f), str) and not isinstance(value, str) else value


def _read_value(text: str) -> Any:
    """Read a value as TOML would; what is no TOML value is a string."""
    import tomllib

    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if list(table) == ["value"] else text


def _refuse_unknown(section: str, key: str, value: Any) -> None:
    """Refuse a key that no section has, with the nearest that one has."""
    name, known = full_name(section, key), [d.name for d in describe()]
    if name in known:
        return
    if name in SECTIONS:
        raise ConfigError(f"{name} is a section; set one of its keys: {_names(SECTIONS[name])}")
    here = [full for full in [*known, *SECTIONS] if full.rpartition(".")[0] == section]
    # The same section comes first, but the right key in the wrong section is found as well.
    by_key = {full.rpartition(".")[2]: full for full in reversed([*here, *known])}
    near = closest(key, by_key)
    tables = [d.name for d in describe() if table_of(d.name) is not None]
    if meant := closest(section, tables) if "." in section else None:
        by_key, near = {key: full_name(meant, key)}, key
    remedy = f"did you mean {by_key[near]!r}?" if near else f"possible are {', '.join(here or SECTIONS)}"
    raise ConfigError(f"unknown key {name!r} (= {value!r}); {remedy}")


def _setting(section: str, key: str) -> Field[Any]:
    return next(f for f in settings(SECTIONS[section] if section else Config) if f.name == key)


def _names(kind: type[Checked]) -> str:
    return ", ".join(f.name for f in settings(kind))
