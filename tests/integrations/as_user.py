"""What a user of SkyRL, slime, miles or prime-rl writes to use this kit, as far as a CPU goes; run in an empty folder.

``scripts/fresh_integrations.py`` starts it in an environment with the wheel, without this checkout on the path. The
framework's name is the argument. Its own classes read and check the configuration; its loss is then called on made-up
log-probs, and one optimizer step ends.
"""

import json
import sys
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import torch

OLD = torch.tensor([-1.0, -2.0, -0.5, -1.5])
SAMPLING = torch.tensor([-1.2, -1.2, -0.4, -2.9])


def step():
    """The end of a training step, after which the run folder gets its row."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def prime_rl(run):
    """The file of ``trainer @ rl.toml``, read by prime-rl's command line; its ``compute_loss``."""
    from prime_rl.configs.trainer import TrainerConfig
    from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn
    from prime_rl.utils.config import cli

    Path("rl.toml").write_text(
        '[loss]\ntype = "custom"\nimport_path = "trl_offpolicy.integrations.prime_rl.loss"\n'
        f'kwargs = {{ preset = "paper/tis", run_dir = "{run}" }}\n'
    )
    config = cli(TrainerConfig, args=["@", "rl.toml"])
    current, mask = OLD.clone().requires_grad_(), torch.ones(4).bool()
    loss, _ = compute_loss(
        [current], [SAMPLING], None, [torch.ones(4)], [mask], None, None, None, setup_rl_loss_fn(config.loss), 4, 1, 1
    )
    return loss, current


def skyrl(run):
    """SkyRL's own entry point with the keys of its command line, up to the start of Ray; its registry and loss."""
    import typing

    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # below Python 3.12 pydantic refuses typing's
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.train.entrypoints import main_base

    reached = []
    main_base.initialize_ray = lambda config: (reached.append(config), sys.exit())
    sys.argv = [
        "main_base.py",
        "trainer.override_entrypoint=trl_offpolicy.integrations.skyrl",
        f"offpolicy={{preset: paper/tis, run_dir: {run}}}",
        "trainer.algorithm.policy_loss_type=offpolicy",
        "generator.sampling_params.logprobs=1",
        "trainer.logger=console",
    ]
    with suppress(SystemExit):
        main_base.main()
    config = reached[0].trainer.algorithm
    current = OLD.clone().requires_grad_()
    loss, _ = PolicyLossRegistry.get(config.policy_loss_type)(
        current[None], OLD[None], torch.ones(1, 4) / 4, config=config, loss_mask=torch.ones(1, 4),
        rollout_logprobs=SAMPLING[None],
    )  # fmt: skip
    return loss, current


LENGTHS = {"response_lengths": [4], "total_lengths": [6]}


def arguments(run):
    """The file of ``--custom-config-path`` as slime and miles read it, and what else their policy loss asks for."""
    import yaml

    Path("offpolicy.yaml").write_text(f"offpolicy: {{preset: paper/tis, run_dir: {run}}}\n")
    given = {"advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None}
    given |= {"entropy_coef": 0.0, "use_kl_loss": False, "use_opsm": False, "get_mismatch_metrics": False}
    given |= {"use_rollout_logprobs": False, "calculate_per_token_loss": False, "rollout_temperature": 1.0}
    given |= {"log_probs_chunk_size": -1, "allgather_cp": False, "qkv_format": "thd", "rollout_top_p": 1.0}
    given |= {"skip_actor_forward_only": False, "observe_training_entropy": False, "true_on_policy_mode": False}
    given |= {"custom_pg_loss_reducer_function_path": None}  # these four are miles' alone
    path = "trl_offpolicy.integrations.slime.correct"
    args = Namespace(**given, use_tis=True, custom_tis_function_path=path)
    for name, value in yaml.safe_load(Path("offpolicy.yaml").read_text()).items():
        setattr(args, name, value)
    return args


def packed():
    """Logits of a model that finds all five words as likely, and the batch that slime and miles hand to their loss."""
    uniform = torch.full((4,), 1 / 5).log()
    batch = {
        "advantages": [torch.ones(4)],
        "log_probs": [uniform],
        "rollout_log_probs": [uniform - (OLD - SAMPLING)],
        "unconcat_tokens": [torch.tensor([1, 2, 3, 1, 2, 3])],
        "loss_masks": [torch.ones(4)],
        "rollout_mask_sums": [torch.tensor(4.0)],
        **LENGTHS,
    }
    return torch.zeros(1, 6, 5).requires_grad_(), batch


def one_process():
    """A process group of this process alone."""
    store = "file://" + str(Path("store").resolve())
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)


def slime(run):
    """slime's policy loss with Megatron on one process."""
    from megatron.core import mpu
    from slime.backends.megatron_utils import loss as slime_loss

    one_process()
    mpu.initialize_model_parallel()
    logits, batch = packed()
    reducer = slime_loss.get_sum_of_sample_mean([6], [4], batch["loss_masks"], batch["rollout_mask_sums"], False)
    loss, _ = slime_loss.policy_loss_function(arguments(run), batch, logits, reducer)
    return loss, logits


def miles(run):
    """miles' policy loss on one process."""
    from miles.backends.training_utils import parallel
    from miles.backends.training_utils.cp_utils import get_sum_of_sample_mean
    from miles.backends.training_utils.loss_hub.losses import policy_loss_function
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    one_process()
    one = GroupInfo(rank=0, size=1, group=torch.distributed.group.WORLD)
    groups = ("intra_dp", "intra_dp_cp", "cp", "tp", "pp", "ep", "etp", "indep_dp")
    parallel.set_parallel_state(parallel.ParallelState(**dict.fromkeys(groups, one)))
    logits, batch = packed()
    reducer = get_sum_of_sample_mean([6], [4], batch["loss_masks"], denominators=batch["rollout_mask_sums"])
    loss, _ = policy_loss_function(arguments(run), batch, logits, reducer)
    return loss, logits


if __name__ == "__main__":
    framework, run = sys.argv[1], Path("run").resolve()
    import trl_offpolicy

    loss, leaf = {"prime-rl": prime_rl, "skyrl": skyrl, "slime": slime, "miles": miles}[framework](run)
    loss.backward()
    step()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    expected = (
        -(OLD - SAMPLING).exp().clamp(max=2.0).mean().item()
    )  # the weights of paper/tis; the ratio pi/pi_old is 1
    if framework == "prime-rl":  # pi_old is pi, so that the ratio pi/pi_old carries the gradient and is 1 as well
        assert "offpolicy/total/kl_k3" in rows[0]
    assert abs(loss.item() - expected) < 1e-5, (loss.item(), expected)
    assert leaf.grad.abs().max() > 0.01 and len(rows) == 1
    print("ORACLE", json.dumps({"loss": loss.item(), "package": trl_offpolicy.__file__}))
