"""docs/metrics.md against the code: the keys on the page are those that are emitted, no more and no fewer."""

import contextlib
import io
import math
import re
from functools import cache
from pathlib import Path

import pytest
import torch

import trl_offpolicy as op
from trl_offpolicy.control import CONTROL_METRICS, LENGTH_SURGE
from trl_offpolicy.control.auto import AUTO_METRICS, CANDIDATE_METRICS
from trl_offpolicy.control.session import SESSION_METRICS
from trl_offpolicy.correction.measure import RATIO_INTERVALS, WEIGHT_INTERVALS, noise_floor
from trl_offpolicy.engines.sync import SYNC_METRICS
from trl_offpolicy.functional.lags import LAG_NAMES
from trl_offpolicy.functional.log_ratios import LOG_RATIO_CLAMP
from trl_offpolicy.functional.moments import HISTOGRAM_BINS, HISTOGRAM_DECADES
from trl_offpolicy.metrics import (
    GROUP_METRICS,
    RATIO_METRICS,
    ROUTING_METRICS,
    VALUE_METRICS,
    WEIGHT_METRICS,
    ProductVariance,
)
from trl_offpolicy.objective.measure import GRADIENT_METRICS
from trl_offpolicy.rollouts.agents.guard import GUARD_METRICS
from trl_offpolicy.rollouts.ahead.queue import AHEAD_METRICS
from trl_offpolicy.rollouts.clock import TIME_METRICS
from trl_offpolicy.rollouts.duplicates import DUPLICATE_METRICS
from trl_offpolicy.rollouts.sampler_stats import SAMPLER_METRICS
from trl_offpolicy.rollouts.screening import SCREEN_METRICS
from trl_offpolicy.rollouts.token_ids import TOKEN_ID_METRICS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
KEYS = re.compile(r"^Keys: `(offpolicy/\S+/)<quantity>`$")
COLUMNS = ["formula", "unit", "divided by", "healthy", "source"]


def cells(line):
    return [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


@cache
def table():
    """{key: row}: the first table with a "quantity" column after each "Keys:" line, its braces expanded."""
    rows, prefixes, header = {}, [], None
    for line in PAGE.splitlines():
        if match := KEYS.match(line):
            before, _, rest = match[1].partition("{")
            names, _, after = rest.partition("}")
            prefixes, header = [before + name + after for name in names.split(",")], None
        elif line.startswith("#"):
            prefixes, header = [], None
        elif line.startswith("| quantity |"):
            header = cells(line)
        elif header and prefixes and line.startswith("| `"):
            row = dict(zip(header, cells(line), strict=True))
            for prefix in prefixes:
                key = prefix + row["quantity"].strip("`")
                assert key not in rows, f"{key} stands twice on the page."
                rows[key] = row
    return rows


def batch():
    generator = torch.Generator().manual_seed(0)
    sampling = -torch.rand(4, 6, generator=generator) - 0.1
    old = sampling + 0.3 * torch.randn(4, 6, generator=generator)
    return op.PolicyBatch(
        per_token_logps=old + 0.1 * torch.randn(4, 6, generator=generator),
        old_per_token_logps=old,
        sampling_per_token_logps=sampling,
        ref_per_token_logps=old - 0.1,
        entropies=torch.ones(4, 6),
        completion_mask=torch.ones(4, 6).bool(),
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]),
        rewards=torch.tensor([1.0, 0.0, 0.75, 0.25]),
        group_rewards=torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.75, 0.75], [0.25, 0.75]]),
        policy_versions=torch.zeros(4, 6, dtype=torch.long),
        current_version=1,
        turn_ids=torch.tensor([[0, 0, 0, 1, 1, 1]] * 4),
    )


OF_AUTO = {f"offpolicy/auto/{name}" for name in AUTO_METRICS}
OF_AUTO |= {f"offpolicy/auto/<candidate>/{name}" for name in CANDIDATE_METRICS}
TIS = op.Correction(weight=op.TruncateWeight(max_weight=2.0))


def generic(key):
    """The key with ``<term>`` in place of a keep term's name, and ``<lag>`` in place of a lag."""
    return re.sub(r"lag/\w+/", "lag/<lag>/", re.sub(r"keep/\w+/", "keep/<term>/", key))


@cache
def emitted():
    """All keys that can be emitted."""
    correction = op.Correction(
        weight=op.TruncateWeight(max_weight=2.0),
        keep=(
            op.RatioBand(low=0.9, high=1.1),
            op.RatioBand(low=0.5, high=2.0),
            op.OutlierVeto(low=1e-4, high=100.0),
            op.DivergenceBand(statistic="k3", high=0.01),
            op.OffPolicySequenceMask(max_divergence=0.05),
        ),
        correct_threshold=0.5,
    )
    shaping = (op.shaping.DiscrepancyPenalty(),)
    objective = op.Objective(correction=correction, kl=op.KLPenalty(coef=0.1), entropy_coef=0.01, shaping=shaping)
    stats = objective(batch()).stats.union(noise_floor(batch().per_token_logps, batch().per_token_logps, batch().mask))
    of_rollouts = (*SYNC_METRICS, *AHEAD_METRICS, *TOKEN_ID_METRICS, *DUPLICATE_METRICS, "outside_fraction")
    of_rollouts += ("kept_ids_mean", "recomputed_cut_fraction")
    of_rollouts += (*SCREEN_METRICS, *GUARD_METRICS, *SAMPLER_METRICS)
    by_engine = {f"offpolicy/rollout/{name}" for name in of_rollouts}
    by_gradient = {f"offpolicy/gradient/{name}" for name in (*GRADIENT_METRICS, "cosine_previous")}
    by_control = {f"offpolicy/control/{name}" for name in CONTROL_METRICS} | {LENGTH_SURGE, *SESSION_METRICS}
    by_control |= OF_AUTO
    by_clock = {f"offpolicy/time/{name}" for name in TIME_METRICS}
    by_routing = {f"offpolicy/routing/{name}" for name in ROUTING_METRICS}
    by_term = set(map(generic, stats))
    return by_term | by_engine | by_gradient | by_control | by_routing | by_clock


def test_every_emitted_key_is_on_the_page():
    assert sorted(emitted() - table().keys()) == []


def test_every_key_on_the_page_is_emitted():
    assert sorted(table().keys() - emitted()) == []
    weights = 2 * 6 + 3 + 6
    weights += len(OF_AUTO)
    rest = 6 + 2 + 2 + weights + 4 + 3 + 12 + 13 + 4 + 10 + 4 + 5 + len(TIME_METRICS)
    rest += 2 + len(SESSION_METRICS)  # loss/discrepancy and its price
    rest += 2 + len(SAMPLER_METRICS)  # of the replayed sampling mask, and of samplers
    assert len(table()) == 5 * len(RATIO_METRICS) + 5 + rest + len(ROUTING_METRICS)


@pytest.mark.parametrize("preset", op.presets.names())
def test_presets_emit_documented_keys_only(preset):
    objective = op.presets.get(preset).objective
    keys = set(map(generic, objective(batch()).stats))
    assert sorted(keys - table().keys()) == []


def test_every_row_is_complete():
    for key, row in table().items():
        assert [column for column in row if column not in ("quantity", "class")] == COLUMNS, key
        assert all(row.values()), key


WITHOUT_CLASS = {LENGTH_SURGE, *SESSION_METRICS} | {f"offpolicy/control/{name}" for name in CONTROL_METRICS} | OF_AUTO
"""Made from rows that are logged already, or once for each generation batch."""


def classes():
    """{key: class} of everything that trl_offpolicy.metrics holds."""
    found = {f"offpolicy/{key}": cls for key, cls in {**GROUP_METRICS, **VALUE_METRICS}.items()}
    ratios = ("mismatch", "kept", "staleness", "total", "noise_floor")
    tables = [(group, RATIO_METRICS) for group in ratios]
    tables += [(group, {"product_variance": ProductVariance}) for group in ratios[:-1]]
    tables += [("weight", WEIGHT_METRICS), ("weight_applied", WEIGHT_METRICS), ("routing", ROUTING_METRICS)]
    return found | {f"offpolicy/{group}/{name}": cls for group, of in tables for name, cls in of.items()}


def test_every_key_has_its_class_or_is_named_as_one_without():
    shown = {key: row["class"].strip("`") for key, row in table().items()}
    assert shown == dict.fromkeys(WITHOUT_CLASS, "-") | {key: cls.__name__ for key, cls in classes().items()}
    assert "(`control/*`,\n`auto/*` and `rollout/length_surge`)" in PAGE


def test_sources_are_listed():
    listed = set(re.findall(r"^- \[(\w)\] ", PAGE, flags=re.MULTILINE))
    used = {mark for row in table().values() for cell in row.values() for mark in re.findall(r"\[([A-Z])\]", cell)}
    assert used == listed


def test_keep_term_names_are_those_of_the_code():
    assert op.RatioBand(low=None, high=2.0, level="token").name == "ratio_band_token"
    assert op.DivergenceBand(statistic="k1", high=1.0, level="sequence").name == "divergence_k1_sequence"
    for name in (
        "ratio_band_<level>",
        "divergence_<statistic>_<level>",
        "outlier_veto",
        "off_policy_sequence_mask",
        *(
            term(**term.example).name
            for term in (
                op.PrefixBudget,
                op.SuffixVeto,
                op.ProbabilityDifferenceMask,
                op.StalenessBound,
                op.EqualRewards,
                op.SecondMomentBudget,
            )
        ),
        op.GroupRejection().name,
    ):
        assert f"`{name}`" in PAGE
    assert op.OutlierVeto(low=None, high=2.0).name == "outlier_veto"
    assert op.OffPolicySequenceMask(max_divergence=0.1).name == "off_policy_sequence_mask"


def test_intervals_are_those_on_the_page():
    (sentence,) = re.findall(r"\*\*Intervals\*\*: (.*?), are logged", PAGE, flags=re.DOTALL)
    assert re.findall(r"`(\w+)`", sentence) == [
        *RATIO_INTERVALS, "mismatch", "staleness", "total", *WEIGHT_INTERVALS, "weight_applied",
    ]  # fmt: skip
    keys = {key for key in op.Objective(correction=TIS)(batch()).stats.compute() if key.endswith("_ci95")}
    ratios = {
        f"offpolicy/{group}/{name}_ci95" for group in ("mismatch", "staleness", "total") for name in RATIO_INTERVALS
    }
    assert keys == ratios | {f"offpolicy/weight_applied/{name}_ci95" for name in WEIGHT_INTERVALS}


def test_lags_are_those_on_the_page():
    assert (*map(str, range(9)), "9_or_more") == LAG_NAMES
    assert "0 to 8, and\n`9_or_more` for all others" in PAGE


def test_constants_on_the_page():
    first, last = HISTOGRAM_DECADES
    assert round(100 * (10 ** ((last - first) / HISTOGRAM_BINS) - 1)) == 12 and "12 % wide" in PAGE
    assert (first, last) == (-8, 4) and f"{HISTOGRAM_BINS} bins in log10 from 1e-8 to 1e4" in PAGE
    assert LOG_RATIO_CLAMP == 20 and "clamped to +-20" in PAGE


def test_statements_about_masks():
    """Raw weights over all trainable tokens, applied ones and ``kept`` over the kept tokens."""
    data = batch()
    out = op.Correction(
        weight=op.TruncateWeight(max_weight=1.2), keep=(op.RatioBand(level="token", low=0.8, high=None),)
    )(data)
    rho = (data.old_per_token_logps - data.sampling_per_token_logps).double().exp()
    kept = rho[rho >= 0.8]
    stats = out.stats.compute()
    assert 0 < len(kept) < rho.numel()
    assert stats["offpolicy/weight/mean"] == pytest.approx(rho.mean().item(), rel=1e-5)
    assert stats["offpolicy/weight_applied/mean"] == pytest.approx(kept.clamp(max=1.2).mean().item(), rel=1e-5)
    assert stats["offpolicy/mismatch/tv"] == pytest.approx(((rho - 1).abs().mean() / 2).item(), rel=1e-5)
    assert stats["offpolicy/kept/tv"] == pytest.approx(((kept - 1).abs().mean() / 2).item(), rel=1e-5)
    assert math.isclose(stats["offpolicy/weight/truncated_fraction"], (rho > 1.2).double().mean().item())


def test_the_example_runs_as_shown():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    shown = re.findall(r"print\(.*\)  # (.*)", code)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs/metrics.md", "exec"), {})
    assert printed.getvalue().split() == shown and shown
