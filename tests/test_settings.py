"""No setting takes a value without a meaning: every field of every class with settings, against every odd value.

Classes are found in the package, so that a new one is tested, or said to hold no settings, before this file passes.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import typing

import pytest
import torch

from trl_offpolicy import checks, losses, presets
from trl_offpolicy.control import ControlSpec, Escalation, LengthGuard
from trl_offpolicy.control.spec import parse_control
from trl_offpolicy.correction import terms
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.objective.kl import FixedKL, KLPenalty
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.objective.proximal import RecomputedProximal
from trl_offpolicy.objective.shaping import DiscrepancyPenalty
from trl_offpolicy.presets.parsing import parse_advantages, parse_correction, parse_objective

MODULES = (
    "control", "correction.correction", "correction.terms", "objective.advantages", "objective.kl", "objective.losses",
    "objective.objective", "objective.proximal", "objective.shaping", "types",
)  # fmt: skip
RECORDS = {  # made by the code, not by hand: a batch, a result, a state
    "AcceptState", "Action", "AdvantageInputs", "AutoRule", "AutoState", "Average", "Candidate", "ControlState",
    "CorrectionOutput",
    "EscalationState", "Estimate", "LengthState",
    "ObjectiveOutput", "Outcome", "PolicyBatch", "ResyncState", "Risk", "ScaleState", "Supervisor", "TermInputs",
}  # fmt: skip
WITHOUT_DEFAULT = {  # where the class's own ``example`` will not do: both sides closed, so that each can be opened
    terms.DivergenceBand: {"statistic": "k3", "low": 0.01, "high": 0.1},
}

NAN, INF = float("nan"), float("inf")
COUNT = torch.tensor(2.0)
NUMBERS = (0, -1, -0.5, NAN, INF, -INF)
OTHERS = (None, True, "0.2", "unknown", "", [], [0.2], (), (0.2,), {}, 1j, object(), object, COUNT)
NONE, SIGNED = {None}, {0, -1, -0.5}
MEANT = {  # the odd values that a field accepts, with what they mean there
    ("ASPO", "high"): (NONE, "no clip where A > 0"),
    ("ASPO", "max_weight"): (NONE, "no cap"),
    ("AveragedProximal", "decay"): ({0}, "no past: the centre is the current policy"),
    ("BandWeight", "low"): (NONE, "open side"),
    ("BandWeight", "high"): (NONE, "open side"),
    ("CISPO", "low"): (NONE, "no lower bound"),
    ("ClipCov", "cov_low"): (SIGNED, "a covariance has either sign"),
    ("Correction", "correct_threshold"): (NONE | SIGNED, "none; a reward has either sign"),
    ("Correction", "keep"): ({()}, "nothing is dropped"),
    ("Correction", "measure"): ({()}, "nothing is measured"),
    ("Correction", "weight"): (NONE | {()}, "no weight"),
    ("ControlSpec", "controllers"): ({()}, "no controller"),
    ("ControlSpec", "max_gradient_cosine"): (NONE, "gradients stay as they are"),
    ("CTPO", "dual_clip"): (NONE, "no dual clip"),
    ("DISPO", "correct_threshold"): (SIGNED, "a reward has either sign"),
    ("DiscrepancyPenalty", "coef"): ({0}, "no price until the target is missed"),
    ("DiscrepancyPenalty", "target"): (NONE, "the price stays"),
    ("DivergenceBand", "low"): (NONE, "open side"),
    ("DivergenceBand", "high"): (NONE, "open side"),
    ("EqualRewards", "tolerance"): ({0}, "exactly equal"),
    ("ESSStep", "metric"): (NONE | {"0.2", "unknown"}, "the ESS of the products; the name of any metric"),
    ("FIPO", "dual_clip"): (NONE, "no dual clip"),
    ("FIPO", "influence_low"): ({0}, "factors above 1 only"),
    ("FIPO", "safe_ratio"): (NONE, "no limit"),
    ("GroupRejection", "max_dropped_fraction"): ({0}, "one dropped response drops its group"),
    ("InterpolatedProximal", "lag"): ({0}, "the centre is the current policy"),
    ("OAPL", "value_beta"): (NONE, "beta"),
    ("Escalation", "pearson"): (SIGNED, "a correlation has either sign; -1 = never"),
    ("Resync", "pearson"): (SIGNED, "a correlation has either sign; -1 = any will do"),
    ("Objective", "correction"): (NONE, "no correction"),
    ("Objective", "drift_coef"): ({0}, "no drift term"),
    ("Objective", "entropy_coef"): (SIGNED, "no bonus; a penalty"),
    ("Objective", "kl"): (NONE, "no KL term"),
    ("Objective", "shaping"): ({()}, "the advantages stay as they are"),
    ("Objective", "max_length"): (NONE, "that of the Reduction, else T of the batch"),
    ("KLPenalty", "max_value"): (NONE, "no cap"),
    ("KLPenalty", "ratio_clip"): (NONE, "no clip"),
    ("OffPolicySequenceMask", "max_divergence"): ({0}, "any divergence is too much"),
    ("OutlierVeto", "low"): (NONE, "open side"),
    ("OutlierVeto", "high"): (NONE, "open side"),
    ("PPOClip", "dual_clip"): (NONE, "no dual clip"),
    ("PPOClip", "delta"): (NONE, "no cap"),
    ("PPOIS", "dual_clip"): (NONE, "no dual clip"),
    ("PrefixMinWeight", "max_weight"): (NONE, "no cap"),
    ("ProbabilityDifferenceMask", "low"): ({-0.5}, "a probability that went down"),
    ("RatioBand", "low"): (NONE, "open side"),
    ("RatioBand", "high"): (NONE, "open side"),
    ("Reduction", "max_length"): (NONE, "T of the batch"),
    ("Reduction", "sequences"): (NONE | {0, COUNT}, "this micro-batch alone; an empty step; a count on the device"),
    ("Reduction", "tokens"): (NONE | {0, COUNT}, "this micro-batch alone; an empty step; a count on the device"),
    ("StalenessBound", "max_lag"): ({0}, "only rows of the current version"),
    ("TOPR", "baseline"): (NONE | SIGNED, "the sign of the advantage decides; a reward has either sign"),
    ("TOPR", "low"): ({0}, "negative responses taper off to nothing"),
    ("TruncateWeight", "min_weight"): (NONE, "no floor"),
    ("VESPO", "lambda_pos"): ({0}, "the smallest rate, 1e-4, as in TRL"),
    ("VESPO", "lambda_neg"): ({0}, "the smallest rate, 1e-4, as in TRL"),
    ("ZeroVariance", "correct_threshold"): (SIGNED, "a reward has either sign"),
}  # fmt: skip
DEEP = [  # wrong in a part, or at odds with another field
    (Correction(), "weight", (terms.RawWeight, "raw", (terms.RawWeight(), None), [terms.RawWeight()])),
    (Correction(), "keep", ((terms.GroupRejection,), (None,), [terms.OutlierVeto(low=None, high=9.0)], "groups")),
    (Correction(), "measure", ("mismatch", ["mismatch"], ("mismatch", None), ("mu",), ({},))),
    (Objective(), "policy_loss", (losses.PPOClip, "ppo_clip", terms.RawWeight())),
    (Objective(), "correction", (Correction, terms.RawWeight())),
    (Objective(), "kl", (KLPenalty, 0.1, FixedKL(coef=0.1))),
    (Objective(), "proximal", (RecomputedProximal, "recomputed")),
    (Objective(), "shaping", ((DiscrepancyPenalty,), [DiscrepancyPenalty()], "discrepancy", (None,))),
    (Objective(), "shaping", ((DiscrepancyPenalty(), DiscrepancyPenalty(target=0.1)),)),
    (KLPenalty(coef=0.1), "coef", (FixedKL, KLPenalty(coef=0.1))),
    (Escalation(), "chi2", ((1, 2), (1, 2, None), (1, 2, NAN), (1, 3, 2), (True, 2, 3), "123", (0, 1, 2), 3)),
    (Escalation(), "dropped", ((0.1, 2.0), (0.1, "0.2"), (0.2, 0.1))),
    (Escalation(), "pearson", (2.0, -1.5)),
    (Escalation(), "ess", (1.5,)),
    (LengthGuard(), "surge", (1.0, 0.9)),
    (ControlSpec(policy="act"), "controllers", ((LengthGuard,), [LengthGuard()], ("length_guard",), (None,))),
    (ControlSpec(), "thresholds", ({"kl_high": 0.1},)),
    (terms.ESSWeight(), "target", (1, 1.0)),
]


def settings():
    """Every dataclass of the modules that is no record."""
    found = set()
    for name in MODULES:
        module = importlib.import_module(f"trl_offpolicy.{name}")
        inside = [f"{module.__name__}.{item.name}" for item in pkgutil.iter_modules(getattr(module, "__path__", ()))]
        for part in [module, *map(importlib.import_module, inside)]:
            found |= {one for _, one in inspect.getmembers(part, dataclasses.is_dataclass) if inspect.isclass(one)}
    ours = {one for one in found if one.__module__.removeprefix("trl_offpolicy.").startswith(MODULES)}
    assert {one.__name__ for one in ours} >= RECORDS
    return {
        one: one(**WITHOUT_DEFAULT.get(one, getattr(one, "example", {}))) for one in ours if one.__name__ not in RECORDS
    }


def odd_values(kind):
    """What a field with this annotation should not take without saying so."""
    if kind is bool:
        return [value for value in (*NUMBERS, *OTHERS, 1) if value is not True]
    whole = int in (kind, *typing.get_args(kind))
    return [*NUMBERS, *OTHERS, *((1.0, 2.5) if whole and float not in typing.get_args(kind) else ())]


def refused(base, field, value):
    """True if the value is refused in the house form; False if it is taken."""
    try:
        dataclasses.replace(base, **{field: value})
    except (ValueError, TypeError) as error:
        label = f"{type(base).__name__}.{field} = {value!r}: {error}"
        assert re.fullmatch(r"\w.* must .*, but got .*\.( Did you mean .*\?)?", str(error), re.DOTALL), label
        assert re.search(rf"\b{field}\b", str(error).split(", but got ")[0]), label
        return True
    return False


def is_among(value, accepted):
    """By type as well: True is not 1, and only the tensor itself is meant."""
    return any(value is one or (type(value) is type(one) and value is not COUNT and value == one) for one in accepted)


def test_odd_values_are_refused_by_name_or_have_a_meaning():
    seen = set()
    for cls, base in settings().items():
        hints = typing.get_type_hints(cls)
        for item in dataclasses.fields(cls):
            accepted, meaning = MEANT.get((cls.__name__, item.name), (set(), "-"))
            seen.add((cls.__name__, item.name))
            assert meaning
            for value in odd_values(hints[item.name]):
                taken = not refused(base, item.name, value)
                assert taken == is_among(value, accepted), f"{cls.__name__}.{item.name} takes {value!r}: {taken}"
    assert set(MEANT) <= seen and len(seen) > 100


def test_none_is_taken_where_the_annotation_says_so_and_nowhere_else():
    for cls in settings():
        for name, kind in typing.get_type_hints(cls).items():
            if typing.get_origin(kind) is not typing.ClassVar:
                optional = type(None) in typing.get_args(kind)
                assert optional == (None in MEANT.get((cls.__name__, name), (set(),))[0]), f"{cls.__name__}.{name}"


def test_parts_are_looked_at():
    for base, field, values in DEEP:
        for value in values:
            assert refused(base, field, value), f"{type(base).__name__}.{field} takes {value!r}"


def test_two_open_sides_are_refused():
    for cls, given in ((terms.RatioBand, {}), (terms.OutlierVeto, {}), (terms.DivergenceBand, {"statistic": "k1"})):
        with pytest.raises(ValueError, match=r"^low and high must not both be None \(.*\), but got two open sides\.$"):
            cls(low=None, high=None, **given)


def test_numbers_without_a_float_are_refused():
    checks.check_number("low", 2**1000)
    for value in (10**400, -(10**400)):
        with pytest.raises(ValueError, match=r"^low must be a finite number, but got -?10+\.$"):
            checks.check_number("low", value)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: _objective(policy_loss={"type": "ppo_clip", "low": None}), "objective.policy_loss: low must be a fin"),
        (lambda: _objective(policy_loss={"type": "kl_cov", "coef": None}), "objective.policy_loss: coef must be a fin"),
        (lambda: _objective(policy_loss={"type": "gspo", "low": "0.3"}), "objective.policy_loss: low must be a finit"),
        (lambda: _objective(kl={"coef": None}), "objective.kl: coef must be a finite number, but got None."),
        (lambda: _objective(entropy_coef=None), "objective: entropy_coef must be a finite number, but got None."),
        (lambda: _objective(kl_weighted="yes"), "objective: kl_weighted must be True or False, but got 'yes'."),
        (lambda: _objective(proximal={"type": "averaged", "decay": None}), "objective.proximal: decay must be a finit"),
        (lambda: _correction(weight={"type": "truncate", "max_weight": None}), "correction.weight: max_weight must be"),
        (lambda: _correction(weight={"type": "ess", "target": True}), "correction.weight: target must be a finite num"),
        (lambda: _correction(keep=[{"type": "staleness_bound", "max_lag": 1.0}]), "correction.keep[0]: max_lag must b"),
        (lambda: _correction(compiled=None), "correction: compiled must be True or False, but got None."),
        (lambda: parse_advantages({"type": "grpo", "scale": None}, where="advantages"), "advantages: scale must be on"),
        (lambda: parse_control({"policy": "act", "patience": None}), "control.patience must be a whole number of at l"),
        (lambda: parse_control({"controllers": {"resync": {"drop": None}}}), "control.controllers.resync: drop must b"),
        (lambda: presets.get("paper/tis", max_weight=None), "max_weight must be a finite number, but got None."),
    ],
)
def test_yaml_says_the_field_too(read, message):
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}"):
        read()


def _objective(**spec):
    return parse_objective(spec, where="objective", base=Objective())


def _correction(**spec):
    return parse_correction(spec, where="correction")
