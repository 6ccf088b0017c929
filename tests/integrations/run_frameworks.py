"""Runs the loss code of prime-rl, SkyRL, slime and miles, with their own correction and with this kit's hook.

``test_frameworks.py`` starts it with the framework's name, whose sources are on PYTHONPATH, the folder of the run, and
for slime the length of the prompts; it prints for each case ``{"theirs": {"loss": ..., "gradient": ...}, "kit": ...}``.
With WORLD_SIZE 2 the log-probs lie in parts on two processes, as the framework's own sequence or context parallelism
leaves them, and its own functions make them whole.
"""

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from integrations.made_up import LENGTHS, flat_tensors

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
RUN = sys.argv[2] if __name__ == "__main__" else ""


def graded(function, current):
    """Loss and gradient of ``function`` at the log-probs of pi; the gradient summed over the ranks that hold parts."""
    current = current.clone().requires_grad_()
    loss = function(current)
    (gradient,) = torch.autograd.grad(loss, current)
    if RANKS > 1:
        torch.distributed.all_reduce(gradient)
    return {"loss": loss.item(), "gradient": gradient.tolist()}


def end_the_step():
    """An optimizer step of no model: what makes a row of the run folder."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()


# ------------------------------------------------------------------------------------------------------------ prime-rl


def prime_rl():
    from prime_rl.configs.trainer import CustomLossConfig, DefaultLossConfig, IPOLossConfig
    from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn

    given, whole = flat_tensors(), lambda current: current
    if RANKS > 1:  # its attention over ranks alone needs this package, and with it CUDA
        sys.modules["ring_flash_attn"] = ring = ModuleType("ring_flash_attn")
        ring.update_ring_flash_attn_params = None
        from prime_rl.utils.cp import gather_for_cp, shard_for_cp

        torch.distributed.init_process_group("gloo")
        rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD

        def whole(current):
            return gather_for_cp(shard_for_cp(current.unsqueeze(0), rank, RANKS), group).squeeze(0)

    weights = torch.linspace(0.5, 1.5, len(given["mask"]))
    weights[:6] = 0.0  # a response of another component

    def custom(**options):
        kwargs = {"framework": "prime-rl", "options": options}
        where = "trl_offpolicy.integrations.prime_rl.loss"
        return CustomLossConfig(type="custom", import_path=where, kwargs={**kwargs, "run_dir": RUN})

    pairs = {
        "default": (DefaultLossConfig(), custom()),
        "tight": (
            DefaultLossConfig(dppo_mask_low=0.05, dppo_mask_high=0.02),
            custom(dppo_mask_low=0.05, dppo_mask_high=0.02),
        ),
        "ipo": (IPOLossConfig(type="ipo", ipo_threshold=0.05), custom(type="ipo", ipo_threshold=0.05)),
    }
    found = {}
    for name, configs in pairs.items():
        for weighted in (False, True):
            answers = []
            for config in configs:
                loss_fn, seen = setup_rl_loss_fn(config), {}

                def loss(current, loss_fn=loss_fn, weighted=weighted, seen=seen):
                    split = {key: list(value.split(LENGTHS)) for key, value in given.items()}
                    value, metrics = compute_loss(
                        list(whole(current).split(LENGTHS)), split["sampling"], None, split["advantages"],
                        [mask.bool() for mask in split["mask"]],
                        list(weights.split(LENGTHS)) if weighted else None, None, None, loss_fn, 37, 1, 1,
                    )  # fmt: skip
                    seen.update(metrics)
                    return value

                answers.append(graded(loss, given["current"]) | {"metrics": sorted(seen)})
            found[f"{name} {'weighted' if weighted else 'plain'}"] = dict(zip(("theirs", "kit"), answers, strict=True))
    end_the_step()
    return found


# --------------------------------------------------------------------------------------------------------------- SkyRL


def skyrl():
    import typing

    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # below Python 3.12 pydantic refuses typing's
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.train.config.config import AlgorithmConfig, OffPolicyCorrectionConfig

    from trl_offpolicy.integrations import skyrl as ours

    flat, whole = flat_tensors(), lambda current: current
    if RANKS > 1:
        from skyrl.backends.skyrl_train.distributed.ulysses import utils as ulysses

        torch.distributed.init_process_group("gloo")
        ulysses.set_ulysses_sequence_parallel_group(torch.distributed.group.WORLD)

        def whole(current):
            part, _, _, padding = ulysses.ulysses_pad_and_slice_inputs(current, sp_size=RANKS)
            return ulysses.gather_outputs_and_unpad(part, gather_dim=1, unpad_dim=1, padding_size=padding)

    pad = torch.nn.utils.rnn.pad_sequence
    given = {name: pad(value.split(LENGTHS), batch_first=True) for name, value in flat.items()}
    cases = {
        "token": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.3},
        "sequence": {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.2},
        "geometric": {"sequence_mask_metric": "geometric", "geo_mask_low": 0.9, "geo_mask_high": 1.1},
        "product": {"tis_ratio_type": "token", "sequence_mask_metric": "product"},
        "outlier": {"outlier_token_is_threshold_low": 0.3, "outlier_token_is_threshold_high": 4.0},
        "token mask": {
            "token_mask_is_threshold_low": 0.7,
            "token_mask_is_threshold_high": 1.4,
            "tis_ratio_type": "token",
        },
    }
    found = {}
    for name, options in cases.items():
        for reduction in ("token_mean", "sequence_mean"):
            advantages = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
                given["advantages"], given["mask"], reduction, micro_batch_size=4, max_seq_len=10
            )
            theirs = AlgorithmConfig(
                off_policy_correction=OffPolicyCorrectionConfig(**options), loss_reduction=reduction
            )
            plain = AlgorithmConfig(policy_loss_type="offpolicy", loss_reduction=reduction)
            ours.register(framework="skyrl", options=options, run_dir=f"{RUN}/{name}")
            answers = []
            for config in (theirs, plain):
                loss_fn, metrics = ppo_utils.PolicyLossRegistry.get(config.policy_loss_type), {}

                def loss(current, loss_fn=loss_fn, config=config, advantages=advantages, metrics=metrics):
                    value, seen = loss_fn(
                        whole(current), given["old"], advantages, config=config, loss_mask=given["mask"],
                        rollout_logprobs=given["sampling"],
                    )  # fmt: skip
                    metrics.update(seen)
                    return value

                answers.append(graded(loss, given["current"]) | {"metrics": metrics})
            found[f"{name} {reduction}"] = dict(zip(("theirs", "kit"), answers, strict=True))
            end_the_step()
    return found


# --------------------------------------------------------------------------------------------------------------- slime


def slime():
    from megatron.core import mpu
    from slime.backends.megatron_utils import loss as slime_loss

    torch.distributed.init_process_group("gloo")
    mpu.initialize_model_parallel(context_parallel_size=RANKS)
    given, (tokens, logits, total) = flat_tensors(), made_up_model(int(sys.argv[3]))
    found = {}
    for name, (options, changes) in mis_cases().items():
        answers = []
        for path in ("mis.compute_mis_weights_with_cp", "trl_offpolicy.integrations.slime.correct"):
            args = slime_arguments(path, options, run_dir=f"{RUN}/{name}", **changes)
            leaf = logits.clone().requires_grad_()
            mine = local(leaf, total)
            batch = slime_batch(given, tokens, total)
            reducer = slime_loss.get_sum_of_sample_mean(
                total, list(LENGTHS), batch["loss_masks"], batch["rollout_mask_sums"], False
            )
            value, log = slime_loss.policy_loss_function(args, batch, mine.unsqueeze(0), reducer)
            (gradient,) = torch.autograd.grad(value, leaf)
            whole = torch.cat([value.detach().reshape(1), gradient.flatten()])
            torch.distributed.all_reduce(whole)  # the parts of a response are on different ranks
            keys = sorted(key for key in log if key.startswith("offpolicy"))
            answers.append({"loss": whole[0].item(), "gradient": whole[1:].tolist(), "metrics": keys})
        found[name] = dict(zip(("theirs", "kit"), answers, strict=True))
        end_the_step()
    return found if torch.distributed.get_rank() == 0 else {}


def made_up_model(prompt):
    """Tokens of prompt and response, the logits of a model at each of them, and the lengths."""
    generator, vocabulary = torch.Generator().manual_seed(5), 11
    tokens = [torch.randint(0, vocabulary, (prompt + n,), generator=generator) for n in LENGTHS]
    logits = torch.randn(sum(map(len, tokens)), vocabulary, generator=generator)
    return tokens, logits, [len(row) for row in tokens]


def mis_cases():
    """Options of ``mis.yaml``, which slime and miles share, and changes of the arguments."""
    mis = {"use_rs": False, "rs_veto_threshold": None, "tis_batch_normalize": False, "rs_level": "token"}
    mis |= {"tis_lower_bound": None, "rs_lower_bound": None, "rs_upper_bound": None}
    cases = {
        "truncate": {"tis_mode": "truncate", "tis_level": "token", "tis_upper_bound": 1.3},
        "sequence": {"tis_mode": "clip", "tis_level": "sequence", "tis_upper_bound": 1.5},
        "mask": {"tis_mode": "mask", "tis_level": "token", "tis_upper_bound": 1.5},
        "geometric": {"tis_mode": "truncate", "tis_level": "token", "tis_upper_bound": 2.0, "use_rs": True,
                      "rs_level": "geometric", "rs_lower_bound": 0.85, "rs_upper_bound": 1.2},
        "veto": {"tis_mode": "truncate", "tis_level": "token", "tis_upper_bound": 2.0, "use_rs": True,
                 "rs_level": "token", "rs_veto_threshold": 0.3, "rs_lower_bound": 0.1, "rs_upper_bound": 10.0},
    }  # fmt: skip
    named = {name: ({**mis, **options}, {}) for name, options in cases.items()}
    return {**named, "measured": (named["veto"][0], MEASURE)}


def local(logits, total):
    """This context-parallel rank's logits as slime packs them; each response is padded to whole chunks."""
    if RANKS == 1:
        return logits
    from slime.backends.megatron_utils.cp_utils import slice_with_cp

    rows = logits.split(total)
    return torch.cat([slice_with_cp(row, lambda x, pad: torch.nn.functional.pad(x, (0, 0, 0, pad))) for row in rows])


MEASURE = {"use_tis": False, "get_mismatch_metrics": True, "use_rollout_logprobs": True}
"""``--use-rollout-logprobs --get-mismatch-metrics``: the loss has mu as its old policy, and is not to be corrected."""


def slime_arguments(path, mis, run_dir, **changes):
    """slime's arguments, as far as its policy loss reads them; those of ``mis.yaml`` also as this kit's options."""
    loss = {"advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None}
    loss |= {"entropy_coef": 0.0, "use_kl_loss": False, "use_opsm": False, "get_mismatch_metrics": False}
    loss |= {"use_rollout_logprobs": False, "calculate_per_token_loss": False, "rollout_temperature": 1.0}
    loss |= {"log_probs_chunk_size": -1, "allgather_cp": False, "qkv_format": "thd", "rollout_top_p": 1.0}
    ours = {"framework": "slime", "options": {"use_tis": True, **mis}, "run_dir": run_dir}
    given = {**loss, **mis, "use_tis": True, "custom_tis_function_path": path, "offpolicy": ours}
    return Namespace(**{**given, **changes})


def slime_batch(given, tokens, total):
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    def rows(name):
        whole = given[name].split(LENGTHS)
        return [slice_log_prob_with_cp(row, t, n) for row, t, n in zip(whole, total, LENGTHS, strict=True)]

    masks = list(given["mask"].split(LENGTHS))
    return {
        "advantages": rows("advantages"),
        "log_probs": rows("old"),
        "rollout_log_probs": rows("sampling"),
        "unconcat_tokens": tokens,
        "response_lengths": list(LENGTHS),
        "total_lengths": total,
        "loss_masks": masks,
        "rollout_mask_sums": [mask.sum() for mask in masks],
    }


# --------------------------------------------------------------------------------------------------------------- miles


def miles():
    from miles.backends.training_utils import parallel
    from miles.backends.training_utils.cp_utils import get_sum_of_sample_mean
    from miles.backends.training_utils.loss_hub.losses import policy_loss_function
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    torch.distributed.init_process_group("gloo")
    one = GroupInfo(rank=0, size=1, group=torch.distributed.group.WORLD)
    groups = ("intra_dp", "intra_dp_cp", "cp", "tp", "pp", "ep", "etp", "indep_dp")
    parallel.set_parallel_state(parallel.ParallelState(**dict.fromkeys(groups, one)))
    given, (tokens, logits, total) = flat_tensors(), made_up_model(2)
    rows = {name: list(given[name].split(LENGTHS)) for name in given}
    batch = {
        "advantages": rows["advantages"],
        "log_probs": rows["old"],
        "rollout_log_probs": rows["sampling"],
        "unconcat_tokens": tokens,
        "response_lengths": list(LENGTHS),
        "total_lengths": total,
        "loss_masks": rows["mask"],
        "rollout_mask_sums": [mask.sum() for mask in rows["mask"]],
    }
    found = {}
    for name, (options, changes) in mis_cases().items():
        answers = []
        for path in ("mis.compute_mis_weights_with_cp", "trl_offpolicy.integrations.slime.correct"):
            args = slime_arguments(path, options, run_dir=f"{RUN}/{name}", **changes)
            vars(args).update(skip_actor_forward_only=False, observe_training_entropy=False, true_on_policy_mode=False)
            vars(args).update(custom_pg_loss_reducer_function_path=None)
            leaf, log = logits.clone().requires_grad_(), {}

            def loss(leaf, args=args, log=log):
                reducer = get_sum_of_sample_mean(
                    total, list(LENGTHS), batch["loss_masks"], denominators=batch["rollout_mask_sums"]
                )
                value, seen = policy_loss_function(args, batch, leaf.unsqueeze(0), reducer)
                log.update(seen)
                return value

            answer = graded(loss, leaf)
            answers.append(answer | {"metrics": sorted(key for key in log if key.startswith("offpolicy"))})
        found[name] = dict(zip(("theirs", "kit"), answers, strict=True))
        end_the_step()
    return found


if __name__ == "__main__":
    cases = {"prime-rl": prime_rl, "skyrl": skyrl, "slime": slime, "miles": miles}[sys.argv[1]]()
    print("ORACLE", json.dumps(cases))
