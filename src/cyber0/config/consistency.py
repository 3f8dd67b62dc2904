"""What must hold between settings: the checks that a section, and then the whole config, makes when it is built.

schema.py declares the settings; this file says which of them contradict each other. A registered factory (a rule, an
optimizer) is asked only where something other than the default is set, so that the default run imports nothing for its
checks; the names of a recorded config are not looked up at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cyber0.config import choices, doors, presets
from cyber0.config.keys import OptionsTable, is_recorded
from cyber0.config.registry import ATTACKS, OPTIMIZERS, PARTITIONS, PRE_AGGREGATIONS, RULES, SCHEDULES, Registry
from cyber0.config.schedules import AUTO, FREE
from cyber0.config.tolerance import PAIRWISE_ROWS, REMEMBERED_CLIENTS, check_expelling, tolerated
from cyber0.errors import ConfigError

if TYPE_CHECKING:
    from cyber0.config.schema import AggregationConfig, Config, FederationConfig, MethodConfig, TaskConfig

INDEX_LIMIT = 2**24  # directions, clients: the index of a counter stream has 24 bits
RISK_LIMIT = 0.01  # share of rounds with more Byzantine clients than b above which a run needs accept_risk
WITHOUT_CLASSES = ("ridge", "logistic")  # tasks whose targets are not numbers of classes
FLOAT32_TINY, FLOAT32_MAX = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


def check_task(task: TaskConfig) -> None:
    """Refuse settings of [task] that the task has no use for, or that contradict each other."""
    text = task.name in choices.TEXT_TASKS
    if task.options and not doors.is_own(task.name):
        raise ConfigError(
            f"task.options = {task.options!r} is for tasks of your own, and task.name = {task.name!r} takes none; "
            "leave task.options out"
        )
    if task.data and doors.is_own(task.name):
        raise ConfigError(
            f"task.data = {task.data!r} is for the tasks of cyber0; give a task of your own a constructor that "
            "takes data, and set task.options.data"
        )
    if task.data and not text and task.name not in choices.DATASETS:
        raise ConfigError(
            f"task.data = {task.data!r} can't be used with task.name = {task.name!r}, which draws its own samples; "
            "leave task.data empty"
        )
    if task.compute and not (task.dtype == "float32" and task.adapter in ("none", "top")):
        raise ConfigError(
            f"task.compute = {task.compute!r} is for weights of the model itself that are stored in float32, and here "
            f'task.dtype = {task.dtype!r} and task.adapter = {task.adapter!r}; set task.dtype = "float32" and '
            'task.adapter = "none" or "top", or leave task.compute out'
        )
    if task.layer and task.adapter not in ("head", "top"):
        raise ConfigError(
            f'task.layer = {task.layer} is for task.adapter = "head" or "top", and task.adapter = {task.adapter!r}; '
            "set one of these, or leave task.layer out"
        )
    if task.validation and text and not task.samples:
        raise ConfigError(
            f"task.validation = {task.validation} takes of the training samples that are not learned from, and "
            "task.samples = 0 learns from all; set task.samples"
        )
    of_text = {"model": task.model, "template": task.template, "label_words": task.label_words}
    for name, value in {
        **of_text,
        "compute": task.compute,
        "validation": task.validation,
        "adapter": "" if task.adapter == "none" else task.adapter,
    }.items():
        if value and not text:
            raise ConfigError(
                f"task.{name} = {value!r} is for text tasks; set task.name to {', '.join(choices.TEXT_TASKS)}"
            )


def check_federation(federation: FederationConfig) -> None:
    """Refuse a federation without honest clients, and options that its attack or partition does not take."""
    if federation.byzantine >= federation.clients:
        raise ConfigError(
            f"federation.byzantine = {federation.byzantine} leaves no honest client among federation.clients = "
            f"{federation.clients}; set federation.byzantine to at most {federation.clients - 1}"
        )
    if is_recorded():
        return
    _check_options(ATTACKS, federation.attack, federation.attack_arguments)
    _check_options(PARTITIONS, federation.partition, federation.partition_arguments)


def check_method(method: MethodConfig) -> None:
    """Refuse settings of [method] that contradict each other."""
    if not is_recorded():
        if method.lr_schedule == FREE:  # also of a user who has registered a schedule by that name
            raise ConfigError(
                f"method.lr_schedule = {FREE!r} is what the ledger of a ZeroOrder says; choose another name"
            )
        _check_options(SCHEDULES, method.lr_schedule, method.lr_options)
        _check_optimizer(method)
        if method.rounding != type(method).rounding and method.name not in ("cyber0", "mezo"):
            raise ConfigError(
                f"method.rounding = {method.rounding!r} is how steps along directions are rounded, and method.name = "
                f"{method.name!r} rounds to nearest; leave method.rounding out"
            )
    probing = method.estimator in choices.PROBING_ESTIMATORS
    if probing and not FLOAT32_TINY <= method.mu <= FLOAT32_MAX:
        remedy = 'set method.estimator = "gradient" or "forward"' if method.mu < 1 else "set method.mu = 0.001"
        raise ConfigError(
            f'method.mu = {method.mu!r} can\'t be used with method.estimator = "{method.estimator}", which divides by '
            f"it in 32-bit numbers; {remedy}"
        )
    if method.local_memory == "regenerate" and method.local_epochs > 1 and not probing:
        raise ConfigError(
            f'method.local_memory = "regenerate" works with method.estimator = "two_point" or "one_sided", not '
            f'with {method.estimator!r}; set method.local_memory = "copy"'
        )
    if method.candidates > 1 and not (probing and method.name in ("cyber0", "mezo", "fedzo")):
        what = f"method.name = {method.name!r}" if probing else f"method.estimator = {method.estimator!r}"
        raise ConfigError(
            f"method.candidates = {method.candidates} can't be used with {what}: gradients cost about as much as the "
            "losses by which samples would be chosen; set method.candidates = 1"
        )
    if method.rank != type(method).rank and method.distribution != "low_rank":
        raise ConfigError(
            f"method.rank = {method.rank} can't be used with method.distribution = {method.distribution!r}, whose "
            'directions have no rank; set method.distribution = "low_rank", or method.rank = 1'
        )
    if method.k * method.local_epochs >= INDEX_LIMIT:
        raise ConfigError(
            f"method.k = {method.k} times method.local_epochs = {method.local_epochs} is "
            f"{method.k * method.local_epochs} directions a round; lower one of them to stay below {INDEX_LIMIT}"
        )


def _check_optimizer(method: MethodConfig) -> None:
    """Refuse an optimizer that can't work with the other settings of [method]."""
    if method.optimizer == "sgd" and not method.optimizer_options:
        return  # nothing is imported for the default run
    made = OPTIMIZERS.make(method.optimizer, method.optimizer_options)
    if method.k < made.least_scalars:  # a local step has k scalars too
        raise ConfigError(
            f"method.k = {method.k} can't be used with method.optimizer = {method.optimizer!r}, which compares the "
            f'scalars of a step; set method.k to at least {made.least_scalars}, or method.optimizer = "adaptive"'
        )
    if method.local_epochs > 1 and made.vectors:
        raise ConfigError(
            f"method.local_epochs = {method.local_epochs} can't be used with method.optimizer = {method.optimizer!r}: "
            "local steps would need vectors of their own; set method.local_epochs = 1, or "
            'method.optimizer = "adaptive"'
        )
    if method.lr == AUTO and not made.lr_measurable:
        raise ConfigError(
            f'method.lr = "auto" can\'t be used with method.optimizer = {method.optimizer!r}, whose steps have the '
            "length lr in every coordinate; set method.lr to a number, such as 1e-4, or "
            'method.optimizer = "adaptive"'
        )
    if method.name not in ("cyber0", "mezo"):
        raise ConfigError(
            f"method.optimizer = {method.optimizer!r} turns decided scalars into a step, and method.name = "
            f'{method.name!r} decides vectors; set method.optimizer = "sgd"'
        )


def check_config(config: Config) -> None:
    """Refuse sections that contradict each other; each has been checked by itself."""
    _check_classes(config)
    _check_method_fits(config)
    if config.task.compute and config.method.estimator not in choices.PROBING_ESTIMATORS:
        raise ConfigError(
            f"task.compute = {config.task.compute!r} rounds weights at probes, and method.estimator = "
            f"{config.method.estimator!r} has none; set method.estimator to "
            f"{' or '.join(choices.PROBING_ESTIMATORS)}, or leave task.compute out"
        )
    invited, b = config.federation.invited, config.aggregation.trimmed(config.federation.invited)
    if 2 * b >= invited:
        raise ConfigError(
            f"aggregation.beta = {config.aggregation.beta!r} trims {b} scalars at each end of {invited} invited "
            "clients, which leaves none; lower aggregation.beta or invite more clients"
        )
    _check_invited(config.aggregation, invited)
    if config.serve.quorum > invited:
        raise ConfigError(
            f"serve.quorum = {config.serve.quorum} can't be reached by {invited} invited clients; "
            f"set serve.quorum to at most {invited}"
        )
    # The plain mean withstands none by design, and where all are invited their number is plain: not refused.
    refusable = config.aggregation.rule != "mean" and invited < config.federation.clients
    if refusable and config.risk > RISK_LIMIT and not config.federation.accept_risk:
        raise ConfigError(
            f"with federation.byzantine = {config.federation.byzantine} of {config.federation.clients} clients, "
            f"{config.risk:.1%} of the samples of {invited} hold more than the {b} that aggregation.beta = "
            f"{config.aggregation.beta!r} withstands; raise federation.participation or aggregation.beta, or set "
            "federation.accept_risk = true"
        )


def _check_invited(aggregation: AggregationConfig, invited: int) -> None:
    """Refuse a rule that can't work with so many invited clients, more than twice as many as it trims."""
    name, before, beta = aggregation.rule, aggregation.before, aggregation.beta
    if is_recorded() or (name in ("mean", "trimmed_mean") and before == "none" and not aggregation.options):
        return  # these need no more, and nothing is imported for the default run
    entry = RULES.find(name)
    rule = None if entry is None else RULES.make(name, aggregation.options, beta=beta)
    if not hasattr(rule, "required"):  # a path (not imported yet) or a plain function: like most rules
        rule = RULES.make("median", beta=beta)
    rule = PRE_AGGREGATIONS.make(before, rule=rule, beta=beta, seed=0)
    b = tolerated(rule.beta, invited)
    try:
        needed = rule.required(b)
    except ConfigError as error:
        raise ConfigError(f"aggregation.rule = {name!r} with aggregation.beta = {beta!r}: {error}") from None
    remedy = "lower aggregation.beta or invite more clients"
    if any(one.size > 1 for one in rule.pre_aggregations):
        remedy = f'{remedy}, or set aggregation.before = "none"'
    if needed > invited:
        raise ConfigError(
            f"aggregation.rule = {name!r} with aggregation.before = {before!r} needs {needed} reports "
            f"to withstand the {b} Byzantine clients of aggregation.beta = {beta!r}, and {invited} are "
            f"invited; {remedy}"
        )
    compares = entry is not None and entry.traits["pairwise"]
    if invited > PAIRWISE_ROWS and (compares or PRE_AGGREGATIONS.entry(before).traits["pairwise"]):
        raise ConfigError(
            f"aggregation.rule = {name!r} with aggregation.before = {before!r} compares every pair of "
            f"{invited} invited clients, and can do so for {PAIRWISE_ROWS}; lower federation.participation or set "
            'aggregation.rule = "trimmed_mean" with aggregation.before = "none" or "bucketing"'
        )


def _check_classes(config: Config) -> None:
    """Refuse an attack on classes where the task has none."""
    if config.federation.attack == "label_flip" and config.task.name in WITHOUT_CLASSES:
        raise ConfigError(
            'federation.attack = "label_flip" turns class l into C - 1 - l, and '
            f"task.name = {config.task.name!r} has no such classes; choose another attack or task"
        )


def _check_method_fits(config: Config) -> None:
    """Refuse what contradicts the method."""
    name, rule, federation = config.method.name, config.aggregation.rule, config.federation
    if presets.own_rule(name) == name != rule:
        raise ConfigError(
            f"method.name = {name!r} is federated averaging with that rule, and aggregation.rule = {rule!r} is "
            f'another; set aggregation.rule = {name!r}, or method.name = "fedavg" for any rule'
        )
    if config.method.lr == AUTO and name not in ("cyber0", "mezo"):
        raise ConfigError(
            f'method.lr = "auto" is for method.name = "cyber0" and "mezo", and this is {name!r}, whose steps are '
            "not along decided directions; set method.lr to a number"
        )
    if name == "mezo":
        _check_central(config)
    if config.serve.keep_reports and name not in ("cyber0", "mezo"):
        raise ConfigError(
            f"serve.keep_reports = true keeps k scalars a report, and method.name = {name!r} sends d of them; set "
            "serve.keep_reports = false"
        )
    if config.aggregation.remembers and federation.clients > REMEMBERED_CLIENTS:
        raise ConfigError(
            f"aggregation.rule = {config.aggregation.rule!r} remembers something of every pair of clients, and can "
            f"for {REMEMBERED_CLIENTS}; lower federation.clients (it is {federation.clients}) or use another rule"
        )
    if config.aggregation.remembers and name != "cyber0":
        raise ConfigError(
            f"aggregation.rule = {config.aggregation.rule!r} judges clients by all their reports, which are stored for "
            f'method.name = "cyber0" alone, and not for {name!r}; use another rule'
        )
    if federation.expel and not config.aggregation.judges:
        judging = [name for name in RULES if RULES.entry(name).traits["judges"]]
        raise ConfigError(
            f"federation.expel = true needs a rule that gathers evidence over the rounds, and aggregation.rule = "
            f"{config.aggregation.rule!r} does not; set aggregation.rule = {judging[0]!r}, or federation.expel = false"
        )
    if federation.expel:
        check_expelling(federation.clients, federation.participation, config.aggregation.beta)
    _check_reference(config)
    directions = federation.clients * config.method.local_epochs * config.method.k
    if name == "fedzo" and directions > INDEX_LIMIT:
        raise ConfigError(
            f'method.name = "fedzo" has directions of its own for every client, and federation.clients = '
            f"{federation.clients} times method.local_epochs = {config.method.local_epochs} times method.k = "
            f"{config.method.k} is {directions} directions a round; lower one of them to stay within {INDEX_LIMIT}"
        )


def _check_central(config: Config) -> None:
    """Refuse what only a federation has."""
    federation, aggregation = config.federation, config.aggregation
    central = 'method.name = "mezo" trains on one machine that has all the samples'
    if federation.byzantine and federation.attack != "none":
        raise ConfigError(
            f"{central}, so nobody is Byzantine; set federation.byzantine = 0 (it is {federation.byzantine}, with "
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


def _check_options(registry: Registry, name: str, options: OptionsTable) -> None:
    """Refuse options that a registered factory does not take; what a path names is imported later."""
    if options and name in registry:  # without options nothing can be wrong, and nothing is imported
        registry.make(name, options)


def _check_reference(config: Config) -> None:
    """Refuse a trusted client without a rule that uses it, such a rule without one, and a federation it can't be in."""
    federation, samples = config.federation, config.aggregation.reference
    if config.aggregation.needs_reference and not samples:
        raise ConfigError(
            f"aggregation.rule = {config.aggregation.rule!r} needs a trusted client; set aggregation.reference to the "
            "number of its samples, such as 100"
        )
    drawn = config.aggregation.reference_batch
    if drawn and not samples:
        raise ConfigError(
            f"aggregation.reference_batch = {drawn} is for a trusted client, and there is none; set "
            "aggregation.reference to the number of its samples, or leave it out"
        )
    if drawn > samples:
        raise ConfigError(
            f"aggregation.reference_batch = {drawn} is more than the trusted client has; set it to at most "
            f"aggregation.reference, which is {samples}"
        )
    if not samples:
        return
    own = doors.is_own(config.aggregation.rule)
    if not config.aggregation.needs_reference and not own:
        raise ConfigError(
            f"aggregation.reference = {samples} makes client 0 a reference, which aggregation.rule = "
            f'{config.aggregation.rule!r} has no use for; set aggregation.rule = "fit_reference", or leave it out'
        )
    if federation.participation < 1:
        raise ConfigError(
            f"aggregation.reference = {samples} needs client 0 in every round; set federation.participation = 1 (it is "
            f"{federation.participation})"
        )
