"""What the hooks refuse at the call, and which process writes. No framework is needed for it."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from trl_offpolicy.integrations import _common, prime_rl, skyrl, slime, verl

LOGPS = torch.tensor([[-1.0, -2.0, -0.5]])
SAMPLING = torch.tensor([[-1.2, -1.5, -0.5]])
MASK = torch.ones(1, 3)
ADVANTAGES = torch.ones(1, 3)


class Node(dict):
    """A configuration of verl, read by attribute and by ``get``."""

    __getattr__ = dict.__getitem__


def verl_config(preset="paper/tis", **totals):
    totals = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None, **totals}
    clip = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None}
    return Node(**clip, policy_loss=Node(offpolicy=Node(preset=preset)), global_batch_info=totals)


def verl_loss(config=None, *, current=LOGPS, sampling=SAMPLING, **more):
    return verl.policy_loss(
        LOGPS, current, ADVANTAGES, MASK, config=config or verl_config(), rollout_log_probs=sampling, **more
    )


def test_verl_takes_what_the_refusals_below_change():
    loss, numbers = verl_loss()
    ratio = (LOGPS - SAMPLING).exp().clamp(max=2.0)
    assert loss.item() == pytest.approx(-ratio.mean().item())
    assert numbers["offpolicy/weight/mean"] == pytest.approx((LOGPS - SAMPLING).exp().mean().item())


def test_verl_refuses_to_weight_twice():
    with pytest.raises(ValueError, match=r"rollout_is must be null .* weighted twice"):
        verl_loss(rollout_is_weights=torch.ones(1, 3))


def test_verl_refuses_a_batch_without_the_samplers_log_probs():
    with pytest.raises(ValueError, match=r"rollout_log_probs must be in verl's batch.*calculate_log_probs to true"):
        verl_loss(sampling=None)


@pytest.mark.parametrize("known", [{}, {"batch_num_tokens": 9}, {"global_batch_size": 4}])
def test_verl_refuses_ranks_whose_totals_are_not_known(known):
    with pytest.raises(ValueError, match="must be known with dp_size 2, but got"):
        verl_loss(verl_config(dp_size=2, **known))
    whole, _ = verl_loss(verl_config(dp_size=2, batch_num_tokens=9, global_batch_size=4))
    alone, _ = verl_loss()
    assert whole.item() == pytest.approx(2 * 3 / 9 * alone.item())  # a mean over 9 tokens, of which DDP takes half


def skyrl_loss(*, old=LOGPS, current=LOGPS, **own):
    names = dict.fromkeys(skyrl._OWN_CORRECTION)
    config = SimpleNamespace(
        eps_clip_low=0.2, eps_clip_high=0.2, off_policy_correction=SimpleNamespace(**{**names, **own})
    )
    spec = {"preset": "paper/tis"}
    return skyrl.policy_loss(current, old, ADVANTAGES, config, MASK, SAMPLING, spec=spec)


def test_skyrl_takes_what_the_refusals_below_change():
    assert skyrl_loss()[0].item() == pytest.approx(-(LOGPS - SAMPLING).exp().clamp(max=2.0).sum().item())


@pytest.mark.parametrize("name", skyrl._OWN_CORRECTION)
def test_skyrl_refuses_its_own_correction_beside_this_one(name):
    with pytest.raises(ValueError, match=f"off_policy_correction.{name} must be null .* but got 1.5"):
        skyrl_loss(**{name: 1.5})


def test_skyrl_refuses_a_decoupled_method_where_the_old_forward_was_skipped():
    with pytest.raises(ValueError, match="old_log_probs must be given with a method of mode decoupled"):
        skyrl_loss(old=None)


@pytest.mark.parametrize("fully_async", [False, True])
def test_skyrl_refuses_a_decoupled_method_in_fully_async_training(fully_async, monkeypatch):
    """Its old log-probs are of newer weights there; SkyRL's own list of losses does not know the name ``offpolicy``."""
    entered = {}
    registry = SimpleNamespace(list_available=lambda: [], register=entered.__setitem__)
    utils = SimpleNamespace(PolicyLossRegistry=registry)
    monkeypatch.setitem(sys.modules, "skyrl.backends.skyrl_train.utils.ppo_utils", utils)
    if fully_async:
        monkeypatch.setitem(sys.modules, "skyrl.train.fully_async_trainer", SimpleNamespace())
        with pytest.raises(ValueError, match="mode bypass in fully async training, but got one of mode decoupled"):
            skyrl.register(preset="paper/tis")
        assert not entered
    else:
        skyrl.register(preset="paper/tis")
    skyrl.register(preset="verl/bypass_ppo_clip")
    assert list(entered) == ["offpolicy"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trainer.algorithm.policy_loss_type=offpolicy"], "offpolicy must be given"),
        (["offpolicy={preset: paper/tis}"], "policy_loss_type=offpolicy must be among the arguments"),
        (
            ["offpolicy={preset: paper/tis}", "trainer.algorithm.policy_loss_type=regular"],
            "must be among the arguments",
        ),
    ],
)
def test_skyrls_entry_point_refuses_a_method_that_would_not_be_used(arguments, said, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["main_base.py", *arguments])
    with pytest.raises(ValueError, match=said):
        skyrl.main()


def test_skyrls_entry_point_refuses_a_method_that_is_no_mapping(monkeypatch):
    """omegaconf is SkyRL's; it reads ``offpolicy=paper/tis`` as this text."""
    reads = SimpleNamespace(from_cli=lambda given: given, to_container=lambda given: dict([given[0].split("=")]))
    monkeypatch.setitem(sys.modules, "omegaconf", SimpleNamespace(OmegaConf=reads))
    monkeypatch.setattr(sys, "argv", ["x", "offpolicy=paper/tis", "trainer.algorithm.policy_loss_type=offpolicy"])
    with pytest.raises(ValueError, match=r"offpolicy must be a mapping, e\.g\. .* but got 'paper/tis'"):
        skyrl.main()


@pytest.mark.parametrize("missing", ["train_log_probs", "rollout_log_probs"])
def test_slime_refuses_a_batch_without_log_probs(missing):
    given = {"train_log_probs": [LOGPS[0]], "rollout_log_probs": [SAMPLING[0]], "loss_masks": [MASK[0]]}
    args = SimpleNamespace(use_tis=True, offpolicy={"preset": "paper/tis"})
    assert slime.correct(args, pg_loss=torch.ones(3), **given)[0].shape == (3,)
    for nothing in (None, []):
        with pytest.raises(ValueError, match="train_log_probs and rollout_log_probs must be given"):
            slime.correct(args, pg_loss=torch.ones(3), **{**given, missing: nothing})


@pytest.mark.parametrize(("ranks", "refused"), [(1, False), (2, True)])
def test_miles_says_over_how_many_ranks_responses_are_split(ranks, refused):
    """By its own state, which its FSDP trainer has without Megatron; a rank may still hold a whole response."""
    given = {"train_log_probs": [LOGPS[0]], "rollout_log_probs": [SAMPLING[0]], "loss_masks": [MASK[0]]}
    given |= {"total_lengths": [5], "response_lengths": [3], "max_seq_lens": None}
    state = SimpleNamespace(cp=SimpleNamespace(size=ranks, rank=0))
    args = SimpleNamespace(use_tis=True, offpolicy={"preset": "paper/tis"})
    if refused:
        with pytest.raises(NotImplementedError, match="known for slime alone"):
            slime.correct(args, pg_loss=torch.ones(3), parallel_state=state, **given)
    else:
        slime.correct(args, pg_loss=torch.ones(3), parallel_state=state, **given)


@pytest.mark.parametrize(("framework", "layout"), [
    ("slime", {}), ("miles", {"parallel_state": SimpleNamespace(cp=SimpleNamespace(size=1, rank=0))}),
])  # fmt: skip
def test_the_run_names_the_framework_that_called(framework, layout, tmp_path):
    """By the parallel state, which miles alone gives to its hook."""
    given = {"train_log_probs": [LOGPS[0]], "rollout_log_probs": [SAMPLING[0]], "loss_masks": [MASK[0]]}
    args = SimpleNamespace(use_tis=True, offpolicy={"preset": "paper/tis", "run_dir": str(tmp_path / "run")})
    slime.correct(args, pg_loss=torch.ones(3, requires_grad=True), **layout, **given)
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["trainer"] == info["engine"] == framework


def prime_rl_loss(current):
    inputs = SimpleNamespace(
        trainer_logprobs=current, inference_logprobs=SAMPLING[0], loss_mask=MASK[0].bool(), advantages=ADVANTAGES[0]
    )
    return prime_rl.loss(inputs, preset="paper/tis")


@pytest.mark.parametrize(
    "part", [lambda: verl_loss(current=LOGPS[:, :2]), lambda: skyrl_loss(current=LOGPS[:, :2]),
             lambda: prime_rl_loss(LOGPS[0, :2])], ids=["verl", "SkyRL", "prime-rl"]
)  # fmt: skip
def test_a_part_of_a_response_beside_a_whole_mask_is_refused(part):
    """As sequence or context parallelism would leave it: all three frameworks make it whole before the loss."""
    with pytest.raises(ValueError, match=r"must have shape .*, but got \(1, 3\)"):
        part()


def megatron(*, data=0, tensor=0, context=0, initialized=True):
    return SimpleNamespace(
        model_parallel_is_initialized=lambda: initialized,
        get_data_parallel_rank=lambda: data,
        get_tensor_model_parallel_rank=lambda: tensor,
        get_context_parallel_rank=lambda: context,
    )


@pytest.mark.parametrize(
    ("state", "first"),
    [
        (megatron(), True),
        (megatron(data=1), False),
        (megatron(tensor=1), False),
        (megatron(context=1), False),
        (megatron(data=1, initialized=False), True),  # imported, not used: one process without a group
    ],
)
def test_with_megatron_the_first_rank_of_the_stage_with_the_loss_writes(state, first, monkeypatch, tmp_path):
    """Not rank 0: that one is in the first pipeline stage, which computes no loss."""
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    assert _common._is_first_process() is first
    slime.correct(
        SimpleNamespace(use_tis=True, offpolicy={"preset": "paper/tis", "run_dir": str(tmp_path / "run")}),
        pg_loss=torch.ones(3, requires_grad=True), train_log_probs=[LOGPS[0]], rollout_log_probs=[SAMPLING[0]],
        loss_masks=[MASK[0]],
    )  # fmt: skip
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()
    assert (tmp_path / "run" / "metrics.jsonl").exists() is first


def test_with_megatron_rank_0_of_another_stage_is_not_asked(monkeypatch):
    """In a pipeline the last stage has another global rank, and its first data-parallel rank still writes."""
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", megatron())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 6)
    assert _common._is_first_process()
    monkeypatch.delitem(sys.modules, "megatron.core.parallel_state")
    assert not _common._is_first_process()
