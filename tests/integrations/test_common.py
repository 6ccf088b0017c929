"""What the hooks share: which methods they take, the run folder, the layouts. No framework is needed for it."""

import json
import math
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint

import trl_offpolicy as op
from trl_offpolicy.diagnosis.doctor import examine
from trl_offpolicy.integrations import _common, skyrl, slime
from trl_offpolicy.run_folder.run_data import read_metrics, read_run_info
from trl_offpolicy.stats import Group, Stats


def read(spec, **more):
    return _common.read_method(spec, where="offpolicy", framework="the framework", **more)


@pytest.mark.parametrize("name", ["verl", "skyrl", "slime", "prime_rl"])
def test_a_hook_is_small(name):
    """One is read in a few minutes, and a new one has about this size: what they share is in ``_common``."""
    source = Path(_common.__file__).with_name(f"{name}.py").read_text().splitlines()
    assert 40 < len(source) <= 150


def test_a_method_is_a_preset_with_changes_around_the_frameworks_own_loss():
    base = op.Objective(policy_loss=op.losses.PPOClip(low=0.1, high=0.3))
    spec = {"preset": "paper/tis", "correction": {"weight": {"type": "truncate", "max_weight": 1.5}}}
    method = read(spec, base=base)
    assert method.objective.policy_loss == base.policy_loss
    assert method.correction.weight == op.TruncateWeight(max_weight=1.5)
    own = read({"preset": "verl/bypass_pg_is"}, base=base)  # the method names its loss
    assert isinstance(own.objective.policy_loss, op.losses.GPG) and own.objective.mode == "bypass"


@pytest.mark.parametrize(
    ("spec", "error", "said"),
    [
        (None, ValueError, "offpolicy must name a method"),
        ({"run_dir": "runs/x"}, ValueError, "offpolicy must name a method"),
        ({"preset": "paper/tiss"}, ValueError, "paper/tiss"),
        ({"preset": "auto"}, NotImplementedError, "auto revises the correction"),
        ({"preset": "paper/tis", "advantages": "rloo"}, ValueError, "makes the advantages"),
        ({"preset": "paper/tis", "objective": {"aggregation": "token_sum"}}, ValueError, "objective.aggregation"),
        ({"preset": "paper/tis", "objective": {"kl": {"coef": 0.1}}}, ValueError, "sets its KL term"),
        ({"preset": "paper/tis", "correction": {"normalize": "original"}}, NotImplementedError, "normalize='original'"),
        ({"preset": "paper/gac"}, NotImplementedError, "also sets control of this kit's trainers"),
        (
            {"correction": {"keep": ["second_moment_budget"]}},
            NotImplementedError,
            "one micro-batch at a time",
        ),
        ({"framework": "verl", "options": {"use_v1": False, "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.1}},
         NotImplementedError, "denominator='kept'"),
    ],
)  # fmt: skip
def test_what_a_hook_cannot_carry_is_refused_with_the_reason(spec, error, said):
    with warnings.catch_warnings(), pytest.raises(error, match=None) as caught:
        warnings.simplefilter("ignore")
        read(spec)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        {"preset": "slime/mis"},
        {"preset": "paper/tis", "correction": {"normalize": "original", "normalize_over": "micro_batch"}},
        {"correction": {"keep": [{"type": "second_moment_budget", "scope": "micro_batch"}]}},
    ],
)
def test_a_hook_that_sees_one_sequence_refuses_what_needs_a_micro_batch(spec):
    """Over one sequence a normalised weight is 1: nothing would be corrected."""
    assert read(spec).objective.scope == "micro_batch"
    with pytest.raises(NotImplementedError, match="one sequence at a time"):
        read({**spec}, row_by_row=True, base=op.Objective(entropy_coef=0.5))
    with pytest.raises(NotImplementedError, match="one sequence at a time"):
        read({**spec}, row_by_row=True, base=op.Objective(entropy_coef=0.5))  # not remembered as one that was taken


def test_a_reduction_that_a_preset_has_of_its_own_is_named():
    with pytest.warns(UserWarning, match=r"reduces its loss as seq_mean_token_mean\. the framework reduces"):
        read({"framework": "openrlhf", "options": {"policy_loss_type": "gspo"}})


def test_a_row_is_written_after_each_optimizer_step_and_the_doctor_reads_it(tmp_path):
    method = read({"preset": "paper/tis", "run_dir": str(tmp_path / "run")})
    logps = torch.nn.Parameter(torch.tensor([[-1.0, -2.0], [-0.5, -3.0]]))
    optimizer = torch.optim.SGD([logps], lr=0.1)
    sampling = torch.tensor([[-1.2, -2.1], [-0.6, -2.0]])
    for _ in range(2):
        for row in range(2):  # micro-batches of one response
            batch = op.PolicyBatch(
                per_token_logps=logps[row : row + 1],
                sampling_per_token_logps=sampling[row : row + 1],
                completion_mask=torch.ones(1, 2).bool(),
                advantages=torch.ones(1),
            )
            result = method.objective(batch)
            result.loss.backward()
            _common.record(method, result.stats, framework="a framework")
        optimizer.step()
        optimizer.step()  # of another model: nothing was added
    rows = read_metrics(tmp_path / "run").rows
    assert [row["step"] for row in rows] == [1, 2]
    log_ratio = torch.tensor([[0.2, 0.1], [0.1, -1.0]])
    k3 = (log_ratio.exp() - 1 - log_ratio).mean().item()
    assert rows[0]["offpolicy/mismatch/kl_k3"] == pytest.approx(k3, rel=1e-5)  # of both micro-batches
    assert read_run_info(tmp_path / "run")["preset"] == "paper/tis"
    assert examine(tmp_path / "run").frameworks == ("trl-offpolicy",)


def test_rows_of_different_length_are_padded():
    assert _common.padded([torch.ones(2), torch.ones(0)]).tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert _common.padded([torch.ones(0)]).shape == (1, 1)


@pytest.mark.parametrize("preset", ["paper/tis", "verl/bypass_pg_is", "verl/decoupled_k3_rs"])
def test_every_rank_logs_the_same_keys(preset):
    """SkyRL reduces its log key by key: a rank that left one out would wait for ever, or add another number to it."""
    method = read({"preset": preset})

    def keys(mask, sampling=-1.0):
        logps = torch.full((2, 3), -1.0)
        batch = op.PolicyBatch(
            per_token_logps=logps, old_per_token_logps=logps, sampling_per_token_logps=torch.full((2, 3), sampling),
            completion_mask=torch.tensor(mask).bool(), advantages=torch.ones(2),
        )  # fmt: skip
        numbers = _common.logged(method.objective(batch).stats)
        assert all(math.isfinite(number) for number in numbers.values())
        return list(numbers)

    usual = keys([[1, 1, 1], [1, 1, 0]])
    assert len(usual) > 20
    assert keys([[0, 0, 0], [0, 0, 0]]) == usual
    assert keys([[1, 1, 1], [1, 1, 0]], sampling=-float("inf")) == usual  # ratios that are infinite


@pytest.mark.parametrize(("value", "shown"), [("nan", 0.0), ("inf", 1e30), ("-inf", -1e30)])
def test_a_number_that_is_not_finite_is_logged_as_one_that_is(value, shown):
    """A divergence must not look like agreement."""
    group = Group(None, {"kl_k1": lambda _: torch.tensor(float(value)), "kl_k3": lambda _: torch.tensor(0.5)})
    found = _common.logged(Stats({"mismatch": group}))
    assert found == pytest.approx({"offpolicy/mismatch/kl_k1": shown, "offpolicy/mismatch/kl_k3": 0.5})


def end_step():
    """An optimizer step of no model, after which the run folder gets its row."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def slime_answer(offpolicy, use_tis=True, **more):
    old = [torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-1.0])]
    sampling = [torch.tensor([-1.0, -3.0, -1.5]), torch.tensor([-0.5])]
    masks = [torch.tensor([1.0, 1.0, 0.0]), torch.tensor([1.0])]
    pg_loss = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    given = {"train_log_probs": old, "rollout_log_probs": sampling, "loss_masks": masks, **more}
    return pg_loss, slime.correct(SimpleNamespace(offpolicy=offpolicy, use_tis=use_tis), pg_loss=pg_loss, **given)


def test_slime_gets_weighted_losses_and_masks_of_each_response():
    offpolicy = {
        "correction": {
            "weight": {"type": "truncate", "max_weight": 2.0},
            "keep": [{"type": "ratio_band", "level": "token", "low": 0.7, "high": None}],
        }
    }
    pg_loss, (weighted, masks, metrics) = slime_answer(offpolicy)
    torch.testing.assert_close(weighted, torch.tensor([1.0, 4.0, 0.0, 4 * 0.6065307]))  # min(e, 2), tool output 0
    assert [mask.tolist() for mask in masks] == [[1.0, 1.0, 0.0], [0.0]]
    assert torch.autograd.grad(weighted.sum(), pg_loss)[0].tolist()[:2] == [1.0, 2.0]
    assert metrics["offpolicy/keep/dropped_token_fraction"].tolist() == pytest.approx([1 / 3] * 4)


def test_slime_without_use_tis_is_measured_and_not_corrected(tmp_path):
    """``--get-mismatch-metrics`` alone calls the hook too, and must leave the loss as it is."""
    offpolicy = {
        "correction": {
            "weight": {"type": "truncate", "max_weight": 2.0},
            "keep": [{"type": "ratio_band", "level": "token", "low": 0.7, "high": None}],
        },
        "run_dir": str(tmp_path / "run"),
    }
    _, (_, _, corrected) = slime_answer(offpolicy)
    folder = tmp_path / "measured"
    pg_loss, (weighted, masks, metrics) = slime_answer({**offpolicy, "run_dir": str(folder)}, use_tis=False)
    assert weighted is pg_loss
    assert [mask.tolist() for mask in masks] == [[1.0, 1.0, 0.0], [1.0]]
    measured = [name for name in metrics if name.startswith("offpolicy/mismatch/")]
    assert len(measured) > 8 and all(torch.equal(metrics[name], corrected[name]) for name in measured)
    assert not [name for name in metrics if name.startswith(("offpolicy/weight", "offpolicy/keep"))]  # none acts
    end_step()
    row = read_metrics(folder).rows[0]
    assert json.loads((folder / "run.json").read_text())["preset"] == "measure"  # what acts, for the doctor
    log_ratios = torch.tensor([0.0, 1.0, -0.5])
    expected = (log_ratios.exp() - 1 - log_ratios).mean().item()
    assert row["offpolicy/mismatch/kl_k3"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_slimes_recomputed_loss_is_recorded_once(recompute, tmp_path, monkeypatch):
    """``--recompute-loss-function`` puts the loss under this checkpoint; without gradient nothing is recorded."""
    offpolicy, added = {"preset": "paper/tis", "run_dir": str(tmp_path / "run")}, []
    monkeypatch.setattr(_common.Recorder, "add", lambda self, stats: added.append(stats))
    arguments = SimpleNamespace(offpolicy=offpolicy, use_tis=True)
    leaf, calls = torch.ones(3, requires_grad=True), []

    def loss(leaf):
        calls.append(1)
        given = {"train_log_probs": [torch.zeros(3)], "rollout_log_probs": [torch.full((3,), -0.1)]}
        weighted, _, _ = slime.correct(arguments, pg_loss=leaf.exp(), loss_masks=[torch.ones(3)], **given)
        return (weighted * weighted).sum()

    with torch.no_grad():
        loss(leaf)
    assert added == []
    found = torch.utils.checkpoint.checkpoint(loss, leaf, use_reentrant=False) if recompute else loss(leaf)
    found.backward()
    assert len(calls) == (3 if recompute else 2) and len(added) == 1
    torch.testing.assert_close(leaf.grad, torch.full((3,), 2 * math.exp(2.2)))  # (e^x e^0.1)^2


def test_slime_refuses_a_loss_of_its_own_and_parts_whose_layout_is_not_known():
    with pytest.raises(ValueError, match="the loss is slime's own"):
        slime_answer({"preset": "verl/bypass_pg_is"})
    with pytest.raises(NotImplementedError, match="known for slime alone"):
        slime_answer({"preset": "paper/tis"}, loss_masks=[torch.ones(5), torch.ones(1)])


@pytest.mark.parametrize("term", [op.ProbabilityDifferenceMask, op.SuffixVeto, op.PrefixBudget])
def test_slime_refuses_masks_that_read_advantages(term):
    with pytest.raises(ValueError, match=f"offpolicy must not name {term.type_name}: .* no advantages"):
        slime_answer({"correction": {"keep": [{"type": term.type_name, "ratio": "old/sampling", **term.example}]}})


@pytest.mark.parametrize(("ranks", "split"), [(1, False), (2, True)])
def test_slime_gathers_by_the_number_of_ranks_and_not_by_what_a_rank_holds(ranks, split, monkeypatch):
    """Of a short response after a long prompt one rank holds all tokens: it must gather too, or the others wait."""
    core = SimpleNamespace(mpu=SimpleNamespace(get_context_parallel_world_size=lambda: ranks))
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    lengths = {"total_lengths": [3003, 3001], "response_lengths": [3, 1]}
    if not split:
        slime_answer({"preset": "paper/tis"}, **lengths)
        return
    with pytest.raises(NotImplementedError, match="known for slime alone"):  # as miles: on every rank
        slime_answer({"preset": "paper/tis"}, **lengths)


def test_skyrl_refuses_a_loss_that_does_not_scale_with_the_advantages():
    assert skyrl._method({"preset": "paper/tis"}, op.Objective()).objective.aggregation == "token_sum"
    with pytest.raises(NotImplementedError, match="DRO"):
        skyrl._method(
            {"preset": "paper/tis", "objective": {"policy_loss": {"type": "dro", "beta": 0.1}}}, op.Objective()
        )
    with pytest.raises(NotImplementedError, match=r"drift_coef 0\.1"):
        skyrl._method({"preset": "paper/tis", "objective": {"drift_coef": 0.1}}, op.Objective())
