"""What torchmetrics promises: reset, forward, copies, checkpoints, devices, dtypes; and how a class looks."""

import copy
import doctest
import inspect
import pickle
from importlib import import_module

import pytest
import torch

import trl_offpolicy.metrics as package
from trl_offpolicy.functional.diagnostics import RATIO_DIAGNOSTICS, WEIGHT_DIAGNOSTICS
from trl_offpolicy.metrics import RATIO_METRICS, WEIGHT_METRICS, MomentMetric

CLASSES = [*RATIO_METRICS.values(), *WEIGHT_METRICS.values()]
TWO_SIDED = {
    "PPLRatio",
    "LogPPLDiff",
    "LogPPLDiffMax",
    "LogPPLDiffMin",
    "WeightMean",
    "WeightMin",
    "WeightMax",
}
HIGHER = {"ProbPearson", "ESSToken", "ESSSequence", "ESSProduct"}
every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


COPIES = {
    "deepcopy": copy.deepcopy,
    "clone": lambda metric: metric.clone(),
    "pickle": lambda metric: pickle.loads(pickle.dumps(metric)),
}


def batch(cls, seed):
    generator = torch.Generator().manual_seed(seed)
    sampling = -torch.rand(5, 8, generator=generator) - 0.1
    old = sampling + 0.3 * torch.randn(5, 8, generator=generator)
    mask = torch.rand(5, 8, generator=generator) > 0.3
    return (old, sampling, mask) if cls in RATIO_METRICS.values() else ((old - sampling).exp(), mask)


def updated(cls, *seeds):
    metric = cls()
    for seed in seeds:
        metric.update(*batch(cls, seed))
    return metric


def value(cls, *seeds):
    return updated(cls, *seeds).compute().item()


def test_every_diagnostic_has_its_class():
    for classes, diagnostics in ((RATIO_METRICS, RATIO_DIAGNOSTICS), (WEIGHT_METRICS, WEIGHT_DIAGNOSTICS)):
        assert list(classes) == list(diagnostics)
        assert [cls.finalize for cls in classes.values()] == list(diagnostics.values())
    assert {cls.__name__ for cls in CLASSES} <= set(package.__all__) and len(set(CLASSES)) == len(CLASSES)


@every_class
def test_properties(cls):
    assert cls.is_differentiable is False and cls.full_state_update is False
    expected = None if cls.__name__ in TWO_SIDED else cls.__name__ in HIGHER
    assert cls.__dict__["higher_is_better"] is expected


EVERY = [cls for cls in vars(package).values() if isinstance(cls, type) and hasattr(cls, "key")]


def test_a_class_holds_its_formula_and_stands_under_its_name():
    """Those of groups and values too; the docstring's first line is the key and the finaliser's own docstring."""
    assert len(EVERY) == len(set(EVERY)) > 70
    for cls in EVERY:
        first, blank, rest = inspect.getdoc(cls).split("\n", 2)
        formula = " ".join(cls.finalize.__doc__.split())
        assert first == f"``{cls.key}``: {formula}" and formula.endswith(".") and not blank
        assert cls.__mro__[1].__name__ in rest and cls.__name__ in package.__all__
        assert getattr(import_module(cls.__module__), cls.__name__) is getattr(package, cls.__name__) is cls
        assert pickle.loads(pickle.dumps(cls)) is cls


@pytest.mark.parametrize("cls", [package.RatioMetric, package.WeightMetric, package.RoutingMetric, package.GroupMetric,
                                 package.ValueMetric], ids=lambda cls: cls.__name__)  # fmt: skip
def test_the_example_of_a_base_runs(cls):
    (example,) = [test for test in doctest.DocTestFinder(recurse=False).find(cls) if test.examples]
    assert doctest.DocTestRunner().run(example) == (0, len(example.examples))


@every_class
def test_reset(cls):
    metric = updated(cls, 0, 1)
    metric.reset()
    assert metric.sums.abs().sum() == 0 and (metric.maxima == -torch.inf).all()
    metric.update(*batch(cls, 2))
    assert metric.compute().item() == value(cls, 2)


@every_class
def test_forward_gives_the_batch_and_accumulates(cls):
    metric = updated(cls, 0)
    assert metric(*batch(cls, 1)).item() == value(cls, 1)
    assert metric(*batch(cls, 2)).item() == value(cls, 2)
    assert metric.compute().item() == pytest.approx(value(cls, 0, 1, 2), rel=1e-12)


@every_class
def test_compute_before_update(cls):
    with pytest.warns(UserWarning, match="before the ``update``"):
        assert cls().compute().item() == 0


@every_class
def test_compute_is_not_stale_after_another_update(cls):
    metric = updated(cls, 0)
    metric.compute()
    metric.update(*batch(cls, 1))
    assert metric.compute().item() == value(cls, 0, 1)


@every_class
@pytest.mark.parametrize("kind", COPIES)
def test_copies_go_on_by_themselves(cls, kind):
    metric = updated(cls, 0)
    twin = COPIES[kind](metric)
    twin.update(*batch(cls, 1))
    assert twin.compute().item() == value(cls, 0, 1)
    assert metric.compute().item() == value(cls, 0)


@every_class
def test_merge_state(cls):
    metric = updated(cls, 0)
    metric.merge_state(updated(cls, 1))
    assert metric.compute().item() == pytest.approx(value(cls, 0, 1), rel=1e-12)


@every_class
def test_state_dict(cls):
    metric = updated(cls, 0)
    assert metric.state_dict() == {}  # torchmetrics' default: states are not saved
    metric.persistent(True)
    saved = metric.state_dict()
    assert {name: state.dtype for name, state in saved.items()} == {
        "sums": torch.float64,
        "maxima": torch.float64,
    }
    restored = cls()
    restored.persistent(True)
    restored.load_state_dict(saved)
    restored.update(*batch(cls, 1))
    assert restored.compute().item() == value(cls, 0, 1)


CASTS = {
    "half": lambda m: m.half(),
    "float": lambda m: m.float(),
    "set_dtype": lambda m: m.set_dtype(torch.float16),
    "to": lambda m: m.to(torch.bfloat16),
    "module": lambda m: torch.nn.ModuleList([m]).to(torch.bfloat16)[0],
    "module_half": lambda m: torch.nn.ModuleList([m]).half()[0],
}


@every_class
@pytest.mark.parametrize("cast", CASTS)
def test_states_stay_float64(cls, cast):
    metric = updated(cls, 0)
    metric.compute()
    metric = CASTS[cast](metric)
    assert metric.sums.dtype == metric.maxima.dtype == metric.compute().dtype == torch.float64
    metric.update(*batch(cls, 1))
    assert metric.compute().item() == value(cls, 0, 1)
    metric.reset()
    assert metric.sums.dtype == metric.maxima.dtype == torch.float64


@every_class
def test_moves_between_devices(cls):
    """The meta device stands for any other one."""
    metric = updated(cls, 0).to("meta")
    assert {metric.sums.device.type, metric.maxima.device.type, metric.device.type} == {"meta"}
    assert metric.sums.dtype == torch.float64
    metric.reset()
    assert metric.sums.device.type == "meta"


@every_class
def test_counts_stay_exact(cls):
    """float32 could not count beyond 2^24."""
    metric = updated(cls, 0)
    tokens = metric.layout.sums.index("tokens")
    metric.sums[tokens] = 2.0**24
    before = metric.sums[tokens].item()
    metric.update(*batch(cls, 1))
    assert metric.sums[tokens].item() == before + updated(cls, 1).sums[tokens].item() > before


@every_class
def test_no_gradient(cls):
    first, *rest = batch(cls, 0)
    first.requires_grad_()
    metric = cls()
    assert not metric(first, *rest).requires_grad
    metric.update(first, *rest)
    assert not metric.sums.requires_grad and not metric.compute().requires_grad


def test_the_base_has_no_formula_of_its_own():
    with pytest.raises(NotImplementedError, match="finalize must be set"):
        MomentMetric.finalize(None)
