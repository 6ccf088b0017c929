"""The rows of the table: every registered weight, keep term and loss, at every level, and every normaliser.

The names come from the kit's registries (what YAML accepts), so a new term has rows by itself, made from its
``example``. What cannot be made by itself is in ``NEEDS`` and ``OWN``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal

from trl_offpolicy import Correction, GroupRejection, Objective, RatioBand, RawWeight, losses, shaping
from trl_offpolicy.correction.terms import KeepTerm, Weight
from trl_offpolicy.correction.terms.weights import WEIGHT_LEVELS
from trl_offpolicy.functional.aggregation import AGGREGATIONS, Aggregation
from trl_offpolicy.functional.levels import LEVELS
from trl_offpolicy.functional.masks import STATISTICS
from trl_offpolicy.objective.advantages import AdvantageEstimator
from trl_offpolicy.objective.losses import PolicyLoss
from trl_offpolicy.presets.catalog import METHODS
from trl_offpolicy.presets.parsing import ADVANTAGE_TYPES, KEEP_TYPES, LOSS_TYPES, WEIGHT_TYPES
from trl_offpolicy.presets.recommended import RECOMMENDED

Mixture = Literal["token", "sequence"]

SEPARABLE: Aggregation = "seq_mean_token_sum"
"""The mean over responses of the sum over tokens: its expectation on-policy is the gradient of the expected reward."""

PRODUCT = RawWeight(level="sequence")
PASS_RATE = 0.9
"""Share of right responses for what looks at prompts on which all of 8 are right: that is then 0.43 of them or more."""

WITH_A_KL = ("deepseek-v3.2/objective", "deepseek-v3.2/whole", "trl/rloo")
"""Presets with a KL to the reference, whose wanted gradient is another one than that of the expected reward."""

BEFORE: dict[type[KeepTerm], tuple[KeepTerm, ...]] = {GroupRejection: (RatioBand(level="token", low=0.8, high=1.25),)}
"""Keep terms that must come before another one."""

OWN: dict[type[PolicyLoss], tuple[Aggregation, float]] = {losses.OAPL: ("seq_mean_token_mean", 2.0)}
"""Losses that the sum over tokens would change: the normaliser that gives one loss a response, and the factor of its
gradient on-policy. OAPL is a square, (beta log(pi / mu) - (R - V))^2, with beta = 1 in its example."""


@dataclass(frozen=True)
class Row:
    """An estimator of the policy gradient.

    Args:
        name: unique.
        group: table in which it stands: weights, keep terms, published methods, losses or normalisers.
        part: name of the weight, keep term, preset, loss or option in YAML that it is about.
        objective: the kit's objective that computes it.
        control: for what depends on the whole batch: the row that resembles it and is known exactly.
        factor: constant by which its loss multiplies the gradient on-policy, besides the normaliser's.
        advantages: estimator that makes the advantages; None = reward minus the target's expected reward.
        mixture: level of the mixture of versions that takes the place of each row's own sampler; None = none does.
        pass_rate: rewards are 0 and 1, and at least this share of the target's responses is right; None = as they are.
    """

    name: str
    group: str
    part: str
    objective: Objective
    control: str | None = None
    factor: float = 1.0
    advantages: AdvantageEstimator | None = None
    mixture: Mixture | None = None
    pass_rate: float | None = None

    @property
    def by_group(self) -> bool:
        """Whether a batch's estimate is the mean of one term for each prompt group, given the advantages."""
        return self.objective.aggregation != "token_mean" and self.objective.scope in ("row", "group")

    @property
    def exact(self) -> bool:
        """Whether it is the mean of one term for each response, which a sum over responses covers."""
        keep = () if self.objective.correction is None else self.objective.correction.keep
        read = {*self.objective.policy_loss.reads, *(name for term in keep for name in term.requires)}
        read |= {name for term in self.objective.shaping for name in term.reads}
        by_row = self.objective.scope == "row" and self.advantages is None
        return self.by_group and by_row and "group_rewards" not in read


def objective(
    weight: Weight | None = None,
    keep: tuple[KeepTerm, ...] = (),
    *,
    loss: PolicyLoss | None = None,
    aggregation: Aggregation = SEPARABLE,
    **others: Any,
) -> Objective:
    """An objective with the plain policy gradient, unless another loss is given, and without ratio diagnostics.

    ``others`` are fields of ``Objective`` or, where it has none of the name, of ``Correction``.
    """
    own = {item.name for item in fields(Objective)}
    to_objective = {name: value for name, value in others.items() if name in own}
    to_correction = {name: value for name, value in others.items() if name not in own}
    return Objective(
        policy_loss=losses.GPG() if loss is None else loss,
        correction=Correction(weight=weight, keep=keep, measure=(), **to_correction),
        aggregation=aggregation,
        **to_objective,
    )


def _variants(cls: type[Any]) -> Iterator[tuple[str, Any]]:
    """Every level (and statistic) that the class accepts, with the settings of its example."""
    names = {item.name for item in fields(cls)}
    levels = [{"level": level} for level in LEVELS] if "level" in names else [{}]
    statistics = [{"statistic": statistic} for statistic in STATISTICS] if "statistic" in names else [{}]
    for statistic in statistics:
        for level in levels:
            try:
                made = cls(**{**cls.example, **statistic, **level})
            except ValueError:  # the pair has no meaning; the class says which have
                continue
            yield " ".join([cls.type_name, *statistic.values(), *level.values()]), made


def _weights() -> Iterator[Row]:
    yield Row("no correction", "weights", "none", objective())
    for part, cls in WEIGHT_TYPES.items():
        for name, weight in _variants(cls):
            wide = weight.scope != "row"
            control = f"raw {weight.level}" if wide and weight.level in WEIGHT_LEVELS else None
            yield Row(name, "weights", part, objective(weight), control)


def _keeps() -> Iterator[Row]:
    for part, cls in KEEP_TYPES.items():
        for name, term in _variants(cls):
            keep = (*BEFORE.get(cls, ()), term)
            wide = term.scope != "row" or "group_rewards" in term.requires
            yield Row(name, "keep terms", part, objective(None, keep), "no correction" if wide else None)
            if term == cls(**cls.example):  # its bias alone, without that of the missing weight
                control = "raw sequence" if wide else None
                yield Row(f"{name}, times the product", "keep terms", part, objective(PRODUCT, keep), control)


def _methods() -> Iterator[Row]:
    """The corrections of the published methods, with the settings of their presets, on the plain policy gradient."""
    for name, method in METHODS.items():
        preset = method.build(name)
        correction = preset.correction
        if correction is None or preset.objective_changes or not (correction.weights or correction.keep):
            continue  # no correction, or a loss of its own
        row = Row(name, "published methods", name, Objective(
            policy_loss=losses.GPG(), correction=replace(correction, measure=()), aggregation=SEPARABLE
        ))  # fmt: skip
        yield row if row.exact else replace(row, control="raw token" if correction.weights else "no correction")


def _whole_methods() -> Iterator[Row]:
    """Presets with a loss, a mode or a shaping of their own, whole but for their normaliser."""
    for name, method in {**METHODS, **RECOMMENDED}.items():
        preset = method.build(name)
        own = set(preset.objective_changes) & {"policy_loss", "mode", "shaping", "drift_coef"}
        if not own or name in WITH_A_KL:
            continue
        correction = replace(preset.correction or Correction(), measure=())
        made = replace(preset.objective, correction=correction, aggregation=SEPARABLE)
        rate = PASS_RATE if "shaping" in own and "rewards" in preset.requires else None
        row = Row(name, "published methods", name, made, pass_rate=rate)
        yield row if row.exact else replace(row, control="no correction")


def _mixtures() -> Iterator[Row]:
    """The balance heuristic: ``old_logps: balance`` has the mixture of each next token, theory that of responses."""
    for level in ("token", "sequence"):
        made = objective(RawWeight(level=level))
        yield Row(f"mixture, raw {level}", "mixtures of versions", "balance", made, mixture="token")
    yield Row(
        "mixture of responses, raw sequence", "mixtures of versions", "balance", objective(PRODUCT), mixture="sequence"
    )


def _estimators() -> Iterator[Row]:
    """Each estimator of the advantages, with the product of ratios, whose own bias is 0."""
    for part, cls in ADVANTAGE_TYPES.items():
        made = objective(PRODUCT)
        name = f"advantages {part}"
        yield Row(name, "advantages", name, made, "raw sequence", advantages=cls(**cls.example))


def _losses() -> Iterator[Row]:
    for part, cls in LOSS_TYPES.items():
        loss = cls(**cls.example)
        aggregation, factor = OWN.get(cls, (SEPARABLE, 1.0))
        options: dict[str, dict[str, Any]] = {"": {}, ", times the product": {"weight": PRODUCT}}
        options[", bypass"] = {"mode": "bypass"}
        for suffix, option in options.items():
            if suffix == ", bypass" and ("sampling_log_ratios" in loss.reads or not loss.uses_ratio):
                continue  # its ratio is pi / mu in any mode, or it has none
            try:
                made = objective(loss=loss, aggregation=aggregation, **option)
            except ValueError:  # the weight would be counted twice
                continue
            row = Row(part + suffix, "losses", part, made, factor=factor)
            control = "no correction" if option.get("weight") is None else "raw sequence"
            yield row if row.exact else replace(row, control=control)
    made = objective()
    yield Row("no correction, rewards of 0 and 1", "losses", "shaping", made, pass_rate=PASS_RATE)
    made = objective(PRODUCT, shaping=(shaping.ZeroVariance(correct_threshold=0.5),))
    yield Row("zero_variance, times the product", "losses", "shaping", made, "raw sequence", pass_rate=PASS_RATE)
    for suffix, weight in {"": None, ", times the product": PRODUCT}.items():
        made = objective(weight, drift_coef=0.1)  # GPG and its pull to the sampler
        yield Row(f"drift{suffix}", "losses", "drift_coef", made)
        made = objective(weight, shaping=(shaping.DiscrepancyPenalty(coef=0.5, target=None),))
        yield Row(f"discrepancy{suffix}", "losses", "shaping", made)  # a reward of its own, so it is biased by design


def _normalisers() -> Iterator[Row]:
    for aggregation in AGGREGATIONS:
        for name, weight in (("no correction", None), ("product", PRODUCT)):
            control = f"{SEPARABLE}, {name}" if aggregation == "token_mean" else None
            made = objective(weight, aggregation=aggregation)
            yield Row(f"{aggregation}, {name}", "normalisers", aggregation, made, control)
    band = (RatioBand(level="sequence", low=0.8, high=1.25),)
    for over in ("generation_batch", "micro_batch"):
        for level in ("token", "sequence"):
            made = objective(RawWeight(level=level), normalize="original", normalize_over=over)
            yield Row(f"normalize original {level} {over}", "normalisers", "normalize", made, f"raw {level}")
    kept = objective(PRODUCT, band, normalize="kept")
    yield Row("normalize kept sequence, band", "normalisers", "normalize", kept, "band, product")
    yield Row("band, product", "normalisers", "denominator", objective(PRODUCT, band))
    made = objective(PRODUCT, band, denominator="kept")
    yield Row("denominator kept, band, product", "normalisers", "denominator", made, "band, product")


@lru_cache
def rows() -> dict[str, Row]:
    """Every row by its name.

    Raises:
        ValueError: two rows have one name, or a control is not an exact row.
    """
    every = [*_weights(), *_mixtures(), *_keeps(), *_methods(), *_whole_methods()]
    every += [*_losses(), *_estimators(), *_normalisers()]
    table = {row.name: row for row in every}
    if len(table) < len(every):
        raise ValueError(f"every row must have its own name, but got {len(every) - len(table)} of them twice.")
    for row in every:
        if row.exact != (row.control is None) or (row.control is not None and not table[row.control].exact):
            raise ValueError(
                f"{row.name} must have an exact control if it depends on the batch, but got {row.control}."
            )
    return table


def missing() -> list[str]:
    """The registered names without a row."""
    have = {row.part for row in rows().values()}
    estimators = (f"advantages {name}" for name in ADVANTAGE_TYPES)
    registered = (*WEIGHT_TYPES, *KEEP_TYPES, *LOSS_TYPES, *estimators, *AGGREGATIONS)
    return [name for name in registered if name not in have]
