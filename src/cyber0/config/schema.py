"""The settings of a run, by section.

Every section checks itself when it is built, so a Config that exists is a Config that can run; what it names by a path
is imported later, by whoever runs it. A setting is declared once, by `key`: its default, its limits and the line that
explains it to a reader. What must hold between settings is in consistency.py; the names that can be chosen live in
choices.py and registry.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Self

from cyber0.config import choices, doors, presets
from cyber0.config.consistency import INDEX_LIMIT, check_config, check_federation, check_method, check_task
from cyber0.config.consistency import WITHOUT_CLASSES as WITHOUT_CLASSES
from cyber0.config.devices import parse_device
from cyber0.config.keys import (
    SECTIONS,
    Checked,
    OptionsTable,
    as_recorded,
    is_recorded,
    key,
    names_in,
    refuse_unknown,
    table,
    with_aliases,
)
from cyber0.config.overrides import apply
from cyber0.config.registry import ATTACKS, OPTIMIZERS, PARTITIONS, PRE_AGGREGATIONS, RULES, SCHEDULES, Registry
from cyber0.config.schedules import AUTO
from cyber0.config.tolerance import invited_count, probability_of_too_many_byzantine, share_of
from cyber0.errors import ConfigError

ROUND_LIMIT = 2**32 - 1  # a round is one 32-bit word of the counter, and so is their number in a record


def _by_path(name: str) -> bool:
    """Return whether a name is not looked up in a registry: it is a path, or comes from a recorded config."""
    return is_recorded() or doors.is_path(name)


ROWS_IN_FLIGHT = 1024
"""Rows that go through a model at once along low-rank directions, if nothing else is set."""


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
    validation: int = key(
        0, "further training samples of a text task, only to measure on; 0: none", limits="at least 0",
        valid=lambda v: v >= 0,
    )  # fmt: skip
    dtype: str = key("float32", "how weights are stored", choices=choices.DTYPES)
    compute: str = key(
        "", "type that a language model computes in; empty: as weights are stored", choices=choices.DTYPES
    )
    weights: str = key("", "safetensors file with the weights to start from; empty: the task's own")
    model: str = key("", "language model: a name on the Hugging Face hub, a folder, or a .gguf file")
    template: str = key("", "prompt of a text task, as '{text} It was {mask}.'; empty: the task's own")
    label_words: str = key("", "the word of each label, as '0=terrible, 1=great'; empty: the task's own")
    adapter: str = key("none", "which weights of a language model are trained", choices=choices.ADAPTERS)
    lora_rank: int = key(8, "rank of adapter lora", limits="at least 1", valid=lambda v: v >= 1)
    prefix_length: int = key(5, "virtual tokens of adapter prefix", limits="at least 1", valid=lambda v: v >= 1)
    layer: int = key(
        0, "last layer of the language model that adapters head and top freeze, from 1; 0: two thirds of the way up",
        limits="at least 0", valid=lambda v: v >= 0,
    )  # fmt: skip
    options: dict[str, Any] = table("of your own task: the keyword arguments of its constructor")

    @property
    def trains_language_model(self) -> bool:
        """Whether what is trained is a language model or part of one, rather than a head on its hidden states."""
        return bool(self.model) and self.adapter != "head"

    @property
    def adapts(self) -> bool:
        """Whether what is trained is an adapter of PEFT's, which is stored apart from its base model."""
        return self.adapter in ("lora", "prefix")

    def check_together(self) -> None:
        check_task(self)


@dataclass(frozen=True)
class FederationConfig(Checked):
    """Who takes part, who is Byzantine, and who holds which data."""

    section: ClassVar[str] = "federation"
    clients: int = key(12, "m, how many clients there are", limits="1 to 2^24", valid=lambda v: 1 <= v <= INDEX_LIMIT)
    byzantine: int = key(3, "how many of the clients are Byzantine", limits="at least 0", valid=lambda v: v >= 0)
    attack: str = key("full_knowledge", "what they send", choices=ATTACKS, own=_by_path)
    attack_options: OptionsTable = table("what the attack takes, as {scale = 2.0}")
    attack_reading: str = key(
        "accepted",
        "alias of attack_options.reading: how the paper's attacks are read",
        choices=choices.ATTACK_READINGS,
        alias="attack_options.reading",
    )
    attack_sign: str = key(
        "honest",
        "alias of attack_options.sign_from: whose sign Fang et al.'s attacks work against",
        choices=choices.ATTACK_SIGNS,
        alias="attack_options.sign_from",
    )
    attack_strength: float = key(
        0.0,
        "alias of the option that sets the strength of an attack (scale, epsilon, z, b, reach); 0: its default",
        limits="at least 0",
        valid=lambda v: v >= 0,
        alias="attack_options.strength",
    )
    partition: str = key("iid", "how samples are dealt to clients", choices=PARTITIONS, own=_by_path)
    partition_options: OptionsTable = table("what the partition takes, as {alpha = 0.1}")
    alpha: float = key(
        0.5,
        "alias of partition_options.alpha, of dirichlet; small: few labels a client, large: nearly iid",
        limits="1e-6 to 1e9",
        valid=lambda v: 1e-6 <= v <= 1e9,
        alias="partition_options.alpha",
    )
    shards: int = key(
        2,
        "alias of partition_options.per_client, of shards: how many each client gets",
        limits="at least 1",
        valid=lambda v: v >= 1,
        alias="partition_options.per_client",
    )
    similarity: float = key(
        0.5,
        "alias of partition_options.similarity, of gamma: share of the samples dealt evenly; 1: iid, 0: by_label",
        limits="0 to 1",
        valid=lambda v: 0 <= v <= 1,
        alias="partition_options.similarity",
    )
    participation: float = key(
        1.0, "share of the clients invited each round", limits="above 0, at most 1", valid=lambda v: 0 < v <= 1
    )
    accept_risk: bool = key(
        False, "run even if over 1 % of the rounds may hold more Byzantine clients than beta covers"
    )
    expel: bool = key(False, "no longer invite a client whose guilt is beyond doubt by all its reports")

    @property
    def invited(self) -> int:
        """How many clients are invited to a round."""
        return invited_count(self.clients, self.participation)

    @property
    def partition_title(self) -> str:
        """The partition with the setting that is its own, if it has one."""
        own: dict[str, OptionsTable] = {"dirichlet": {"alpha": self.alpha}, "shards": {"per_client": self.shards},
                                 "gamma": {"similarity": self.similarity}}  # fmt: skip
        options = own.get(self.partition, {}) | self.partition_options
        if self.partition == "shards":
            return f"shards ({options['per_client']} each)"
        options_text = ", ".join(f"{k} = {v:g}" if isinstance(v, float) else f"{k} = {v}" for k, v in options.items())
        return f"{doors.short(self.partition)} ({options_text})" if options_text else doors.short(self.partition)

    @property
    def attack_arguments(self) -> OptionsTable:
        """The options of the attack, those set by their old names included."""
        strength = ""
        if self.attack_strength > 0:
            entry = ATTACKS.find(self.attack)
            strength = "" if entry is None else entry.traits["strength"]
            if not strength:
                having = [name for name in ATTACKS if ATTACKS.entry(name).traits["strength"]]
                raise ConfigError(
                    f"federation.attack = {self.attack!r} takes no strength, but federation.attack_strength = "
                    f"{self.attack_strength!r}; set it to 0 (attacks that take one are {', '.join(having)})"
                )
        takes = partial(_options_of, ATTACKS, self.attack)
        return with_aliases(self, "attack_options", takes, {"strength": strength})

    @property
    def partition_arguments(self) -> OptionsTable:
        """The options of the partition, those set by their old names included."""
        return with_aliases(self, "partition_options", partial(_options_of, PARTITIONS, self.partition))

    def check_together(self) -> None:
        check_federation(self)


@dataclass(frozen=True)
class MethodConfig(Checked):
    """How the loss is measured and the weights are moved."""

    section: ClassVar[str] = "method"
    name: str = key("cyber0", "the algorithm", choices=choices.METHODS)
    k: int = key(
        64, "directions a step; for cyber0 the scalars each client sends", limits="at least 1", valid=lambda v: v >= 1
    )
    mu: float = key(
        0.001,
        "length of the probing step of two_point and one_sided",
        limits="at least 0",
        valid=lambda v: v >= 0,
    )
    lr: float | str = key(
        0.01,
        "learning rate; auto: measured before the first round",
        limits="above 0, or auto",
        valid=lambda v: v > 0,
        word=AUTO,
    )
    lr_schedule: str = key("constant", "the learning rate over the run", choices=SCHEDULES, own=_by_path)
    lr_options: OptionsTable = table("what the schedule takes")
    batch_size: int = key(64, "samples a client draws each step", limits="at least 1", valid=lambda v: v >= 1)
    candidates: int = key(
        1,
        "times batch_size that a client draws, to measure batch_size of them, mostly of large loss",
        limits="at least 1",
        valid=lambda v: v >= 1,
    )
    local_epochs: int = key(1, "E, local steps of a client each round", limits="at least 1", valid=lambda v: v >= 1)
    local_memory: str = key("copy", "how a client undoes its local steps", choices=choices.LOCAL_MEMORIES)
    distribution: str = key("gaussian", "distribution of the directions", choices=choices.DISTRIBUTIONS)
    rank: int = key(
        1, "rank of every matrix of a low_rank direction", limits="at least 1", valid=lambda v: 1 <= v <= INDEX_LIMIT
    )
    rows_in_flight: int = key(
        ROWS_IN_FLIGHT,
        "most rows (samples times probes) in one pass along low_rank directions",
        limits="at least 1",
        valid=lambda v: v >= 1,
    )
    estimator: str = key("two_point", "how the slope along a direction is measured", choices=choices.ESTIMATORS)
    optimizer: str = key("sgd", "how decided scalars become a step", choices=OPTIMIZERS)
    optimizer_options: OptionsTable = table("what the optimizer takes, as {beta = 0.98}")
    rounding: str = key("stochastic", "how steps of 16-bit weights are rounded", choices=choices.ROUNDINGS)
    projection_radius: float = key(
        0.0, "keep the weights in a ball of this radius; 0: no limit", limits="at least 0", valid=lambda v: v >= 0
    )

    @property
    def rate(self) -> float:
        """The learning rate as a number.

        Raises:
            ConfigError: it is "auto" and has not been measured.
        """
        if isinstance(self.lr, str):
            raise ConfigError(
                f"method.lr = {self.lr!r} is measured when a run starts; start it by `cyber0 run` or cyber0.run, or "
                "set method.lr to a number"
            )
        return self.lr

    def check_together(self) -> None:
        check_method(self)


@dataclass(frozen=True)
class AggregationConfig(Checked):
    """How the federator turns the reports of a round into one decision."""

    section: ClassVar[str] = "aggregation"
    rule: str = key("", "robust mean of the reports; empty: the method's own", choices=RULES, own=_by_path)
    options: OptionsTable = table("what the rule takes, as {tau = 2.0}; beta is a setting of its own")
    before: str = key("none", "what is done to the reports before", choices=PRE_AGGREGATIONS)
    beta: float = key(
        0.25,
        "share of Byzantine clients to withstand: floor(beta m) are trimmed at each end",
        limits="at least 0, below 0.5",
        valid=lambda v: 0 <= v < 0.5,
    )
    reference: int = key(
        0, "training samples of client 0, which is then trusted and has no vote; 0: nobody is trusted",
        limits="at least 0", valid=lambda v: v >= 0,
    )  # fmt: skip
    reference_batch: int = key(
        0, "samples the trusted client draws each step; 0: method.batch_size, as all others",
        limits="at least 0", valid=lambda v: v >= 0,
    )  # fmt: skip

    @property
    def needs_reference(self) -> bool:
        """Whether the rule needs a trusted client; a rule of the user's own is not asked."""
        return self._trait("reference")

    @property
    def remembers(self) -> bool:
        """Whether the rule judges clients by earlier rounds; a rule of the user's own is not asked."""
        return self._trait("history")

    @property
    def judges(self) -> bool:
        """Whether the rule can say who is guilty beyond doubt; a rule of the user's own is asked when it is made."""
        return doors.is_own(self.rule) or self._trait("judges")

    def _trait(self, name: str) -> bool:
        if self.rule in ("mean", "trimmed_mean") or doors.is_own(self.rule) or self.rule not in RULES:
            return False  # nothing is imported for the default run
        return bool(RULES.entry(self.rule).traits[name])

    def trimmed(self, invited: int) -> int:
        """Return b = floor(beta * invited), how many are trimmed at each end."""
        return share_of(self.beta, invited)


@dataclass(frozen=True)
class ServeConfig(Checked):
    """A federation over the network."""

    section: ClassVar[str] = "serve"
    deadline_s: float = key(60.0, "seconds to wait for reports", limits="above 0", valid=lambda v: v > 0)
    quorum: int = key(1, "reports without which a round is abandoned", limits="at least 1", valid=lambda v: v >= 1)
    codec: str = key("float32", "how scalars travel", choices=choices.CODECS)
    seed_mode: str = key("shared", "what directions are drawn from", choices=choices.SEED_MODES)
    durability: str = key("always", "when the ledger is forced to disk", choices=choices.DURABILITIES)
    keep_reports: bool = key(False, "keep every report in reports.bin, for cyber0 verify --decisions")
    scalar_limit: float = key(
        1e6, "largest magnitude of a decided scalar that a client accepts", limits="above 0", valid=lambda v: v > 0
    )
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
                object.__setattr__(
                    self, "aggregation", replace(self.aggregation, rule=presets.own_rule(self.method.name))
                )
        check_config(self)

    @property
    def stores_reports(self) -> bool:
        """Whether every report is stored: serve.keep_reports, or a rule that is computed from earlier rounds."""
        return self.serve.keep_reports or self.aggregation.remembers

    @cached_property
    def risk(self) -> float:
        """The probability that a round holds more Byzantine clients than b; 0 or 1 where all are invited."""
        federation, invited = self.federation, self.federation.invited
        return probability_of_too_many_byzantine(federation.clients, federation.byzantine, invited, self.borne)

    @property
    def borne(self) -> int:
        """How many Byzantine clients a round withstands: b, and none with the plain mean."""
        return 0 if self.aggregation.rule == "mean" else self.aggregation.trimmed(self.federation.invited)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build a config from nested tables; what is absent takes its default, what is unknown is refused."""
        data = values = presets.with_defaults(data)
        for name, value in list(data.items()):
            if name not in SECTIONS:
                refuse_unknown("", name, value)
                if "." in name:
                    section, _, key = name.rpartition(".")
                    raise ConfigError(
                        f"{name!r} (= {value!r}) belongs in its section: {{{section!r}: {{{key!r}: ...}}}}"
                    )
                continue
            kind = SECTIONS[name]
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name} = {value!r} must be a table; its keys are {names_in(kind)}")
            for inner, inner_value in value.items():
                refuse_unknown(name, inner, inner_value)
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
        if self.aggregation.rule == presets.own_rule(self.method.name):
            values["aggregation"]["rule"] = ""
        return type(self).from_dict(apply(presets.without_defaults(values), overrides))


def _options_of(registry: Registry, name: str) -> list[str]:
    entry = registry.find(name)
    return [] if entry is None else entry.options


def for_header(config: Config) -> Config:
    """Return the settings as a ledger's header has them: "mezo" is a federation of one client, whatever is set."""
    if config.method.name != "mezo":
        return config
    alone = replace(config.federation, clients=1, byzantine=0, partition="iid")
    return replace(config, federation=alone, serve=replace(config.serve, quorum=1))


def to_dict(config: Config) -> dict[str, Any]:
    """Return the config as nested tables of plain values, without what is younger than headers that exist.

    These are empty tables of options, task.weights, compute, validation and layer if empty, aggregation.reference and
    reference_batch if 0, federation.expel if false, serve.scalar_limit, method.candidates, method.optimizer,
    method.rank, method.rows_in_flight and method.rounding at their defaults: they change neither the header nor the
    identity of runs that don't use them.
    """
    result = {
        name: {key: one for key, one in value.items() if one != {}} if isinstance(value, dict) else value
        for name, value in asdict(config).items()
    }
    for name in ("weights", "compute", "validation", "layer"):
        if not result["task"][name]:
            del result["task"][name]
    for name in ("reference", "reference_batch"):
        if not result["aggregation"][name]:
            del result["aggregation"][name]
    if not config.federation.expel:
        del result["federation"]["expel"]
    if config.serve.scalar_limit == ServeConfig.scalar_limit:
        del result["serve"]["scalar_limit"]
    for name in ("candidates", "optimizer", "rank", "rows_in_flight", "rounding"):
        if result["method"][name] == getattr(MethodConfig, name):
            del result["method"][name]
    return result
