"""The policy loss in real verl 0.9.1: equal to verl's rollout correction under its 19 presets, and to this kit's own.

``test_verl_engine.py`` trains with it in verl's actor worker.
"""

import json
import socket
import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
import trl
from tiny_models import score_last_word, tiny_prompts
from verl_process import HOW, PYTHON, answer, start

from trl_offpolicy import PolicyBatch, Reduction, presets
from trl_offpolicy.presets.frameworks.verl.losses import AGGREGATIONS
from trl_offpolicy.run_folder.names import translate
from trl_offpolicy.trl.config import OffPolicyGRPOConfig
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000), pytest.mark.skipif(PYTHON is None, reason=HOW)]

NAMED = [name.removeprefix("verl/") for name in presets.names() if name.startswith("verl/")]
SETTINGS = [
    ({"dp_size": 1, "batch_num_tokens": 31, "global_batch_size": 8}, "token-mean"),
    ({"dp_size": 2, "batch_num_tokens": 77, "global_batch_size": 16}, "token-mean"),
    ({"dp_size": 2, "batch_num_tokens": 77, "global_batch_size": 16}, "seq-mean-token-sum-norm"),
    ({"dp_size": 4, "batch_num_tokens": 120, "global_batch_size": 32}, "seq-mean-token-sum"),
    (
        {"dp_size": 2, "batch_num_tokens": 77, "global_batch_size": 16, "loss_scale_factor": 11},
        "seq-mean-token-sum-norm",
    ),
    ({"dp_size": 4, "batch_num_tokens": 120, "global_batch_size": 32}, "seq-mean-token-mean"),
    ({"dp_size": 2, "batch_num_tokens": 77, "global_batch_size": 16}, "token-sum"),
]
"""Totals of the mini-batch over all ranks, and each of verl's reductions."""
assert {mode for _, mode in SETTINGS} == AGGREGATIONS.keys()
CASES = [(name, i) for name in NAMED for i in range(len(SETTINGS))]


BATCHES = {"ragged": (7, (7, 6, 0, 4, 1, 7, 5, 3)), "no empty row": (23, (6, 7, 2, 5, 3, 7, 4, 7))}
"""Seed of the random numbers, and the lengths of the responses."""


def tensors(kind="ragged"):
    """Eight responses: padding, tool output, an empty row in one of the batches, ratios out of every band."""
    seed, lengths = BATCHES[kind]
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(7) < torch.tensor(lengths).unsqueeze(1)
    mask[5, 2:4] = False
    old = -0.1 - 3 * torch.rand(8, 7, generator=generator)
    mismatch = 0.4 * torch.randn(8, 7, generator=generator)
    mismatch[0, 3], mismatch[6, 1] = 2.5, -2.2
    mismatch[1] *= 0.001  # two responses that every band keeps, one of them long
    mismatch[7] *= 0.001
    current = (old + 0.2 * torch.randn(8, 7, generator=generator)).clamp(max=-1e-3)
    current[1], current[7] = old[1] + 1e-4, old[7] - 1e-4
    fields = {"current": current, "old": old, "sampling": (old - mismatch).clamp(max=-1e-3)}
    padded = {name: torch.where(mask, values, 0.0) for name, values in fields.items()}
    advantages = torch.randn(8, 1, generator=generator).expand(8, 7)
    return {**padded, "mask": mask.float(), "advantages": advantages}


@cache
def answers(ranks=1):
    """What verl and this kit make of every batch, preset and setting: ``{batch preset setting: {"verl", "kit"}}``."""
    batches = {kind: {name: values.tolist() for name, values in tensors(kind).items()} for kind in BATCHES}
    request = json.dumps({"batches": batches, "named": NAMED, "settings": SETTINGS})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    started = [start("run_verl.py", given=request, **group, RANK=str(rank)) for rank in range(ranks)]
    found = [answer(process) for process in started]
    return found[0]


def answers_of(name, setting, kind="ragged"):
    found = answers()[f"{kind} {name} {setting}"]
    return found["verl"], found["kit"]


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_value_and_gradient_are_those_of_verls_own_rollout_correction(name, setting):
    theirs, ours = answers_of(name, setting)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-5, abs=1e-6)
    gradient = torch.tensor(ours["gradient"])
    torch.testing.assert_close(gradient, torch.tensor(theirs["gradient"]), rtol=1e-4, atol=1e-6)
    assert gradient.abs().max() > 1e-4  # there is something to compare


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_it_is_the_objective_of_this_kit_on_the_same_tensors(name, setting):
    totals, aggregation = SETTINGS[setting]
    given = tensors()
    current = given["current"].clone().requires_grad_()
    batch = PolicyBatch(
        per_token_logps=current,
        old_per_token_logps=given["old"],
        sampling_per_token_logps=given["sampling"],
        completion_mask=given["mask"],
        advantages=given["advantages"] * given["mask"],
    )
    objective = replace(presets.get(f"verl/{name}").objective, aggregation=AGGREGATIONS[aggregation])
    step = Reduction(
        tokens=totals["batch_num_tokens"],
        sequences=totals["global_batch_size"],
        world_size=totals["dp_size"],
        max_length=totals.get("loss_scale_factor"),
    )
    loss = objective(batch, step).loss
    (gradient,) = torch.autograd.grad(loss, current)
    _, ours = answers_of(name, setting)
    assert ours["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(torch.tensor(ours["gradient"]), gradient, rtol=1e-4, atol=1e-6)


OTHER_UNDER_REJECTION = (
    "loss/clip_region_fraction",
    "staleness/kl_k1",
    *(f"weight_applied/{name}" for name in ("mean", "std", "ess_token")),
)
"""Over the kept tokens in verl, over all here; weights the other way round."""


OF_AN_EMPTY_RESPONSE = {
    "chi2_sequence": 0,
    "dropped_sequence_fraction": 0,
    "log_ppl_diff": 0,
    "log_ppl_abs_diff": 0,
    "ppl_ratio": 1,
}
"""Means over responses into which verl counts the empty one of the eight, as this number."""


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize(("name", "setting"), CASES)
def test_metrics_under_both_names_agree(name, setting, kind):
    theirs, ours = answers_of(name, setting, kind)
    empty = kind == "ragged"
    bypass = name.startswith("bypass")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = translate(theirs["metrics"], "bypass_mode" if bypass else "vanilla")
    shared = {key for key in read.keys() & ours["metrics"].keys() if key.startswith("offpolicy/")}
    if "rs" in name:
        shared -= {f"offpolicy/{key}" for key in OTHER_UNDER_REJECTION}
        if bypass:  # verl's actor/ppo_kl is read as this one too, and is of kept tokens
            shared -= {"offpolicy/total/kl_k1"}
    assert len(shared) >= (3 if bypass else 7), sorted(shared)
    for key in sorted(shared):
        found, quantity = ours["metrics"][key], key.rpartition("/")[2]
        if (
            empty
            and quantity == "truncated_fraction"
            and presets.get(f"verl/{name}").correction.weights[0].level == "sequence"
        ):
            found = 7 / 8 * found  # one weight a response
        if empty and quantity in OF_AN_EMPTY_RESPONSE:
            found = (7 * found + OF_AN_EMPTY_RESPONSE[quantity]) / 8
        assert found == pytest.approx(read[key], rel=2e-3, abs=1e-5), key
    if not bypass and "rs" not in name:
        for key in ("actor/pg_clipfrac", "actor/ppo_kl"):
            assert ours["metrics"][key] == pytest.approx(theirs["metrics"][key], rel=1e-4, abs=1e-6), key


@pytest.fixture(scope="module")
def trainer_of(model_folder, tokenizer, tmp_path_factory):
    """``trainer_of(preset)``: this kit's TRL trainer with a preset of verl; its model is not asked for log-probs."""
    from transformers import AutoModelForCausalLM

    def build(name):
        own = OffPolicyGRPOConfig(
            offpolicy={"preset": f"verl/{name}", "objective": {"aggregation": "token_mean"}},
            output_dir=str(tmp_path_factory.mktemp("trl")), use_cpu=True, bf16=False, report_to="none", beta=0.0,
            per_device_train_batch_size=8, num_generations=2, max_completion_length=7, record_rollouts=False,
            write_report=False, gradient_checkpointing=False,
        )  # fmt: skip
        trainer = OffPolicyGRPOTrainer(
            AutoModelForCausalLM.from_pretrained(model_folder("llama")),
            score_last_word,
            own,
            train_dataset=tiny_prompts(),
            processing_class=tokenizer,
            rollout_func=lambda prompts, trainer: {},  # brings the sampler's log-probs
        )
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        return trainer

    return build


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", NAMED)
def test_the_kits_trl_trainer_has_the_same_loss_and_gradient(name, kind, trainer_of, monkeypatch):
    """``_compute_loss`` of ``OffPolicyGRPOTrainer`` on the tensors of verl's loss, against verl's own correction."""
    given, trainer = tensors(kind), trainer_of(name)
    current = given["current"].clone().requires_grad_()
    scored = (current, torch.zeros_like(current), None)
    monkeypatch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", lambda *args, **kwargs: scored)
    ids = torch.ones(8, 7, dtype=torch.long)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": given["mask"].long(),
        "advantages": given["advantages"][:, 0],
        "old_per_token_logps": given["old"],
        "sampling_per_token_logps": given["sampling"],
        "num_items_in_batch": torch.tensor(31),  # the batch_num_tokens of the first setting
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    (gradient,) = torch.autograd.grad(loss, current)
    theirs, _ = answers_of(name, 0, kind)
    assert loss.item() == pytest.approx(theirs["loss"], rel=2e-5, abs=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(theirs["gradient"]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_sequence_parallelism_of_verl_changes_nothing(name, setting):
    """Two ranks hold parts of the packed log-probs; verl's gather makes them whole before its loss and this one."""
    found, alone = answers(2)[f"ragged {name} {setting}"], answers()[f"ragged {name} {setting}"]
    for side in ("verl", "kit"):
        assert found[side]["loss"] == pytest.approx(alone[side]["loss"], rel=1e-6)
        gradients = (torch.tensor(one[side]["gradient"]) for one in (found, alone))
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
    assert found["kit"]["metrics"] == pytest.approx(alone["kit"]["metrics"], rel=1e-5, abs=1e-7)
