"""Runs the loss code of prime-rl, SkyRL and slime, with their own correction and with this kit's hook.

``test_frameworks.py`` starts it with the framework's name, whose sources are on PYTHONPATH, and for slime the length of
the prompts; it prints for each case ``{"theirs": {"loss": ..., "gradient": ...}, "kit": ...}``.
"""

import json
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import torch

LENGTHS = (6, 4, 1, 5)


def tensors():
    """Four responses of different length, ratios out of every band, tool output, both signs of the advantage."""
    generator = torch.Generator().manual_seed(3)
    total = sum(LENGTHS)
    old = -0.1 - 2.5 * torch.rand(total, generator=generator)
    mismatch = 0.3 * torch.randn(total, generator=generator)
    mismatch[2], mismatch[12] = 1.6, -1.5
    mismatch[6:10] *= 0.01
    current = (old + 0.2 * torch.randn(total, generator=generator)).clamp(max=-1e-3)
    mask = torch.ones(total)
    mask[3] = mask[13] = 0
    advantages = torch.cat([torch.full((n,), a) for n, a in zip(LENGTHS, (1.0, -0.7, 0.4, -1.3), strict=True)])
    rows = {"current": current, "old": old, "sampling": (old - mismatch).clamp(max=-1e-3)}
    return {**rows, "mask": mask, "advantages": advantages}


def graded(function, current):
    """Loss and gradient of ``function`` at the log-probs of pi."""
    current = current.clone().requires_grad_()
    loss = function(current)
    (gradient,) = torch.autograd.grad(loss, current)
    return {"loss": loss.item(), "gradient": gradient.tolist()}


# ------------------------------------------------------------------------------------------------------------ prime-rl


def prime_rl():
    from prime_rl.configs.trainer import CustomLossConfig, DefaultLossConfig, IPOLossConfig
    from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn

    given, run = tensors(), tempfile.mkdtemp()
    weights = torch.linspace(0.5, 1.5, len(given["mask"]))
    weights[:6] = 0.0  # a response of another component

    def custom(**options):
        kwargs = {"framework": "prime-rl", "options": options}
        where = "trl_offpolicy.integrations.prime_rl.loss"
        return CustomLossConfig(type="custom", import_path=where, kwargs={**kwargs, "run_dir": run})

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
                        list(current.split(LENGTHS)), split["sampling"], None, split["advantages"],
                        [mask.bool() for mask in split["mask"]],
                        list(weights.split(LENGTHS)) if weighted else None, None, None, loss_fn, 37, 1, 1,
                    )  # fmt: skip
                    seen.update(metrics)
                    return value

                answers.append(graded(loss, given["current"]) | {"metrics": sorted(seen)})
            found[f"{name} {'weighted' if weighted else 'plain'}"] = dict(zip(("theirs", "kit"), answers, strict=True))
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()  # the end of the trainer's step
    rows = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return found, {"rows": len(rows), "kl_k3": rows[0]["offpolicy/total/kl_k3"], "step": rows[0]["step"]}


# --------------------------------------------------------------------------------------------------------------- SkyRL


def skyrl():
    import typing

    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # SkyRL is for Python 3.12, whose own one pydantic takes
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.train.config.config import AlgorithmConfig, OffPolicyCorrectionConfig

    from trl_offpolicy.integrations import skyrl as ours

    flat = tensors()
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
            ours.register(framework="skyrl", options=options)
            answers = []
            for config in (theirs, plain):
                loss_fn, metrics = ppo_utils.PolicyLossRegistry.get(config.policy_loss_type), {}

                def loss(current, loss_fn=loss_fn, config=config, advantages=advantages, metrics=metrics):
                    value, seen = loss_fn(
                        current, given["old"], advantages, config=config, loss_mask=given["mask"],
                        rollout_logprobs=given["sampling"],
                    )  # fmt: skip
                    metrics.update(seen)
                    return value

                answers.append(graded(loss, given["current"]) | {"metrics": metrics})
            found[f"{name} {reduction}"] = dict(zip(("theirs", "kit"), answers, strict=True))
    return found, {}


# --------------------------------------------------------------------------------------------------------------- slime


def slime():
    from megatron.core import mpu
    from slime.backends.megatron_utils import loss as slime_loss

    torch.distributed.init_process_group("gloo")
    ranks = torch.distributed.get_world_size()
    mpu.initialize_model_parallel(context_parallel_size=ranks)
    given, prompt, vocabulary = tensors(), int(sys.argv[2]), 11
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(0, vocabulary, (prompt + n,), generator=generator) for n in LENGTHS]
    logits = torch.randn(sum(map(len, tokens)), vocabulary, generator=generator)
    total = [len(row) for row in tokens]
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
    found = {}
    for name, options in cases.items():
        answers = []
        for path in ("mis.compute_mis_weights_with_cp", "trl_offpolicy.integrations.slime.correct"):
            args = slime_arguments(path, {**mis, **options})
            leaf = logits.clone().requires_grad_()
            mine = local(leaf, total, ranks)
            batch = slime_batch(given, tokens, total, ranks)
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
    return (found if torch.distributed.get_rank() == 0 else {}), {}


def local(logits, total, ranks):
    """This context-parallel rank's logits as slime packs them; each response is padded to whole chunks."""
    if ranks == 1:
        return logits
    from slime.backends.megatron_utils.cp_utils import slice_with_cp

    rows = logits.split(total)
    return torch.cat([slice_with_cp(row, lambda x, pad: torch.nn.functional.pad(x, (0, 0, 0, pad))) for row in rows])


def slime_arguments(path, mis):
    """slime's arguments, as far as its policy loss reads them; those of ``mis.yaml`` also as this kit's options."""
    loss = {"advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None}
    loss |= {"entropy_coef": 0.0, "use_kl_loss": False, "use_opsm": False, "get_mismatch_metrics": False}
    loss |= {"use_rollout_logprobs": False, "calculate_per_token_loss": False, "rollout_temperature": 1.0}
    loss |= {"log_probs_chunk_size": -1, "allgather_cp": False, "qkv_format": "thd", "rollout_top_p": 1.0}
    ours = {"framework": "slime", "options": {"use_tis": True, **mis}}
    return Namespace(**loss, **mis, use_tis=True, custom_tis_function_path=path, offpolicy=ours)


def slime_batch(given, tokens, total, ranks):
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


if __name__ == "__main__":
    cases, more = {"prime-rl": prime_rl, "skyrl": skyrl, "slime": slime}[sys.argv[1]]()
    print("ORACLE", json.dumps({"cases": cases, **more}))
