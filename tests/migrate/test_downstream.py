"""What 2,037 scripts of projects that build on the frameworks showed on 2026-11-28, each as the few lines that matter.

The lines are written anew; the reference beside each says where the like of it stands and what reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from migrated_files import CLIP, SKYRL, SLIME, VERL, carried, check_case

from trl_offpolicy.cli.migrate import migrated
from trl_offpolicy.migrate.page import TO_SET

GUESSED = "if, case, && or || alone set these, and their value is taken as if they ran: "
OLD_VERL = VERL + "actor_rollout_ref.actor.ppo_micro_batch_size=16 algorithm.kl_ctrl.kl_coef=0.002 "
BATCH = "data.train_batch_size=32 actor_rollout_ref.actor.ppo_mini_batch_size=32 trainer.n_gpus_per_node=4 "
AREAL = "gconfig: {n_samples: 4}\nactor:\n  path: a\n  use_decoupled_loss: true\n"
NEMO = "policy: {model_name: a, generation: {max_new_tokens: 9}}\n"
KL, WEIGHT = "offpolicy.objective.kl", "offpolicy.correction.weight"

CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    # Open-AgentRL, examples/grpo_trainer: what one branch sets would be empty without it
    "a branch alone sets it": (
        "a.sh", 'if [ "$MODE" = dapo ]; then\n  HIGH=0.28\n  OTHER=1\nfi\n'
        + VERL + "actor_rollout_ref.actor.clip_ratio_high=${HIGH:-0.2}",
        {f"{CLIP}.high": 0.28}, f"{GUESSED}HIGH still",
    ),
    "a branch sets what another variable is made of": (
        "a.sh", '[ -n "$KL" ] && EXTRA="actor_rollout_ref.actor.use_kl_loss=True"\nALL="$EXTRA"\n' + VERL + "$ALL",
        {f"{KL}.coef": 0.001}, f"{GUESSED}EXTRA",
    ),
    "a branch asks whether it is set": (
        "a.sh", 'if [ -z "$N" ]; then\n  N=8\nfi\n[[ -z "${T}" ]] && T=0.5\n' + VERL
        + "actor_rollout_ref.rollout.n=$N actor_rollout_ref.rollout.temperature=$T",
        {"num_generations": 8, "temperature": 0.5}, "",
    ),
    "arithmetic in square brackets": (
        "a.sh", "GPUS=4\n" + VERL + "data.max_response_length=$[GPUS*8]", {"max_completion_length": 32}, "",
    ),
    # inclusionAI/ASearcher, AReaL/areal/api/cli_args.py:243-300, engine/ppo/actor.py:60-150
    "AReaL's first name of the cap": (
        "a.yaml", AREAL + "  behav_imp_weight_cap: 5.0\n",
        {"offpolicy.correction.keep": [{"type": "ratio_band", "low": None, "high": 5.0, "level": "token"}]}, "",
    ),
    "AReaL's switches of the norms": (
        "a.yaml", AREAL + "  group_reward_norm: true\n  adv_norm: false\n",
        {"offpolicy.advantages.type": "grpo", "offpolicy.advantages.epsilon": 1e-9}, "",
    ),
    "AReaL's advantage norm by default": (
        "a.yaml", AREAL + "  group_reward_norm: true\n",
        {"offpolicy.advantages.type": "reinforce_plus_plus_baseline", "offpolicy.advantages.scale": "group"}, "",
    ),
    # AReaL cbff54d, utils/data.py: class Normalization
    "AReaL's deviation over n": (
        "a.yaml", AREAL + "  reward_norm: {mean_level: group, std_level: group, std_unbiased: false}\n",
        {"offpolicy.advantages": TO_SET}, "std_unbiased=false",
    ),
    "AReaL's deviation over n, whitened after it": (
        "a.yaml", AREAL + "  reward_norm: {mean_level: group, std_level: batch, std_unbiased: false}\n"
        "  adv_norm: {mean_level: batch, std_level: batch}\n",
        {"offpolicy.advantages": "reinforce_plus_plus_baseline"}, "",
    ),
    "AReaL's batch without the token itself": (
        "a.yaml", AREAL + "  adv_norm: {mean_level: batch, std_level: batch, mean_leave1out: true}\n",
        {"offpolicy.advantages": TO_SET}, "adv_norm.mean_leave1out",
    ),
    # SkyRL a9564572e, backends/skyrl_train/utils/ppo_utils.py: compute_policy_loss_kl_cov, reduce_loss
    "SkyRL KL-Cov": (
        "a.sh", SKYRL + "trainer.algorithm.policy_loss_type=kl_cov", {f"{CLIP}.type": "kl_cov"},
        "SkyRL adds the penalty up",
    ),
    # NeMo-RL 7ea279abf, algorithms/advantage_estimator.py: GDPO's components leave the response itself out by default
    "NeMo-RL GDPO": (
        "a.yaml", "grpo: {adv_estimator: {name: gdpo}}\n" + NEMO, {"offpolicy.advantages": TO_SET},
        "use_leave_one_out_baseline=True",
    ),
    "NeMo-RL GDPO with the whole group": (
        "a.yaml", "grpo: {adv_estimator: {name: gdpo, use_leave_one_out_baseline: false}}\n" + NEMO,
        {"offpolicy.advantages": "gdpo"}, "",
    ),
    "NeMo-RL REINFORCE++": (
        "a.yaml", "grpo: {adv_estimator: {name: reinforce_plus_plus}}\n" + NEMO,
        {"offpolicy.advantages": "reinforce_plus_plus_baseline"}, "variance by n, this kit by n - 1",
    ),
    # slime 624b824a8: ray/rollout.py:609-633, backends/megatron_utils/loss.py:758-819
    "slime without a baseline": (
        "a.sh", SLIME + "--advantage-estimator grpo --disable-rewards-normalization",
        {"offpolicy.advantages": TO_SET}, "the estimator of the raw reward",
    ),
    "slime GSPO without a baseline": (
        "a.sh", SLIME + "--advantage-estimator gspo --disable-rewards-normalization",
        {"offpolicy.advantages": TO_SET, "importance_sampling_level": "sequence"}, "",
    ),
    "slime GRPO, whitened": (
        "a.sh", SLIME + "--advantage-estimator grpo --normalize-advantages",
        {"offpolicy.advantages.type": "reinforce_plus_plus_baseline", "offpolicy.advantages.scale": "group",
         "offpolicy.advantages.epsilon": 1e-6}, "",
    ),
    "slime Dr. GRPO": (
        "a.sh", SLIME + "--advantage-estimator grpo --disable-grpo-std-normalization",
        {"offpolicy.advantages": "dr_grpo"}, "r - mean of the group",
    ),
    "slime REINFORCE++ with a baseline": (
        "a.sh", SLIME + "--advantage-estimator reinforce_plus_plus_baseline --kl-coef 0.1",
        {"offpolicy.advantages": "dr_grpo"}, "--kl-coef: its KL is taken from the advantages",
    ),
    "slime REINFORCE++ with a baseline, whitened": (
        "a.sh", SLIME + "--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages",
        {"offpolicy.advantages": "reinforce_plus_plus_baseline"}, "",
    ),
    "slime, functions of one's own": (
        "a.sh", SLIME + "--advantage-estimator grpo --custom-advantage-function-path a.f --loss-type custom_loss "
        "--custom-loss-function-path a.g",
        {"offpolicy.advantages": TO_SET, CLIP: TO_SET}, "the estimator of a function of your own",
    ),
    "slime, rewards of one's own": (
        "a.sh", SLIME + "--custom-reward-post-process-path a.f", {"offpolicy.advantages": TO_SET}, "",
    ),
    "slime, the engine's log-probs": (
        "a.sh", SLIME + "--use-rollout-logprobs", {"offpolicy.objective.mode": "bypass"}, "",
    ),
    # TinyZero, verl/trainer/ppo/ray_trainer.py:631 and config/ppo_trainer.yaml: before use_kl_in_reward
    "verl 0.2, the KL in the reward": (
        "a.sh", OLD_VERL + "actor_rollout_ref.actor.clip_ratio=0.1",
        {f"{KL}.place": "reward", f"{KL}.coef": 0.002, "offpolicy.objective.entropy_coef": 0.001,
         f"{CLIP}.low": 0.1, f"{CLIP}.high": 0.1},
        "to verl 0.2 the KL is in the reward unless use_kl_loss",
    ),
    "verl 0.2, the KL in the loss": (
        "a.sh", OLD_VERL + "actor_rollout_ref.actor.use_kl_loss=True", {f"{KL}.place": None, f"{KL}.coef": 0.001}, "",
    ),
    "verl since 0.3, no KL": (
        "a.sh", VERL + "algorithm.kl_ctrl.kl_coef=0.002", {KL: None}, "add algorithm.use_kl_in_reward=true if yours",
    ),
    "verl 0.2, responses of all devices": (
        "a.sh", VERL + BATCH + "actor_rollout_ref.actor.ppo_micro_batch_size=16",
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}, "",
    ),
    # PRIME-RL/Entropy-Mechanism-of-RL, dp_actor.py:382: the options stood beside the clip's
    "a fork's Clip-Cov": (
        "a.sh", VERL + "actor_rollout_ref.actor.loss_mode=clip_cov actor_rollout_ref.actor.clip_cov_ratio=0.001",
        {f"{CLIP}.type": "clip_cov", f"{CLIP}.fraction": 0.001}, "",
    ),
    # TTRL, RAGEN, rLLM: one value that is none does not end the reading
    "verl, switched off": (
        "a.sh", VERL + "trainer.test_freq=False trainer.save_freq=False",
        {"eval_strategy": "no", "save_strategy": "no"}, "",
    ),
    "verl, unknown held-out responses": (
        "a.sh", VERL + "trainer.test_freq=2 actor_rollout_ref.rollout.val_kwargs.n=$N",
        {"eval_strategy": "steps", "num_generations_eval": None}, "val_kwargs.n",
    ),
    "verl without a length": (
        "a.sh", VERL + "data.max_response_length=null data.max_prompt_length=9",
        {"max_completion_length": TO_SET, "vllm_max_model_length": None}, "null: the engine's own length there",
    ),
    "verl, a bound below 0": (
        "a.sh", VERL + "actor_rollout_ref.actor.clip_ratio_low=-1", {"epsilon": TO_SET}, "a bound of -1 is refused",
    ),
    "TRL, no warmup steps": (
        "a.yaml", "model_name_or_path: a\nwarmup_ratio: 0.1\nwarmup_steps: 0\n", {"warmup_steps": 0.1}, "",
    ),
    "TRL, warmup steps": (
        "a.yaml", "model_name_or_path: a\nwarmup_ratio: 0.1\nwarmup_steps: 7\n", {"warmup_steps": 7}, "decides",
    ),
    # prime-rl, configs/debug/algo
    "prime-rl, another algorithm": (
        "a.toml", '[orchestrator]\nbatch_size = 100\ngroup_size = 16\n[orchestrator.algo]\ntype = "opd"\n',
        {"offpolicy.advantages": TO_SET, "num_generations": TO_SET}, "of the algorithm 'opd'",
    ),
    "prime-rl, a loss of one's own": (
        "a.toml", '[trainer.loss]\ntype = "custom"\nimport_path = "a.f"\n', {CLIP: TO_SET}, "your own loss",
    ),
    # SkyRL: skyrl/train/trainer.py:1477, config.py:849; older names of the loss and the estimator
    "SkyRL, whitened": (
        "a.sh", SKYRL + "trainer.algorithm.advantage_batch_normalize=true", {"offpolicy.advantages": TO_SET}, "",
    ),
    "SkyRL, not whitened": (
        "a.sh", SKYRL + "trainer.algorithm.advantage_batch_normalize=false", {"offpolicy.advantages.type": "grpo"}, "",
    ),
    "SkyRL, a mean by prompt": (
        "a.sh", SKYRL + "trainer.algorithm.loss_reduction=prompt_mean", {"offpolicy.objective.aggregation": TO_SET}, "",
    ),
    "SkyRL's older names": (
        "a.sh", SKYRL.replace("false", "true") + "trainer.algorithm.ppo_loss_type=dual_clip "
        "trainer.algorithm.use_kl_estimator_k3=false trainer.algorithm.kl_loss_coef=0.01",
        {"delta": 3.0, f"{KL}.estimator": "k1"}, "",
    ),
    # SkyRL-agent's run_verl scripts: its program, verl's settings
    "SkyRL's program with verl's settings": (
        "a.sh", VERL.replace("verl.trainer.main_ppo", "skyrl_agent.integrations.verl.verl_main_ppo"),
        {"num_generations": 4}, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_real_setting_means_here_what_it_means_there(name: str, tmp_path: Path) -> None:
    check_case(tmp_path, CASES[name])


def test_what_is_set_where_it_is_not_set_is_no_guess(tmp_path: Path) -> None:
    _, text, _, _ = CASES["a branch asks whether it is set"]
    assert GUESSED not in carried(tmp_path, "a.sh", text)[1]
    body = "main() {\n  N=8\n  " + VERL + "actor_rollout_ref.rollout.n=$N\n}\nmain\n"
    fields, lists = carried(tmp_path, "a.sh", body)
    assert fields["num_generations"] == 8 and GUESSED not in lists
    both = 'if [ "$A" = 1 ]; then\n  N=8\nelse\n  N=4\nfi\n' + VERL + "actor_rollout_ref.rollout.n=$N"
    assert "num_generations" not in carried(tmp_path, "a.sh", both)[0]  # neither is taken


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a.sh", "swift rlhf --rlhf_type dpo --model m --beta 0.1"),
        ("a.sh", "trl dpo --model_name_or_path m --beta 0.1"),
        ("a.sh", "trl sft --model_name_or_path m --learning_rate 1e-5"),
        ("a.sh", "accelerate launch trl/scripts/sft.py --model_name_or_path m --learning_rate 1e-5"),
        ("a.sh", "torchrun --nproc 4 -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet optim.lr=1e-4"),
        ("a.sh", "deepspeed --module openrlhf.cli.train_dpo --learning_rate 5e-6"),
        ("a.sh", "python -m openrlhf.cli.train_sft --learning_rate 5e-6 --max_epochs 2"),
        ("a.yaml", "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\nlearning_rate: 1e-4\n"),
    ],
)
def test_a_training_without_rollouts_is_refused(file: str, text: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=r"file must be a run that learns from rollouts, but .* something else"):
        migrated(tmp_path / file)


def test_python_and_an_empty_toml_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("GRPOConfig(beta=0.1)\n")
    with pytest.raises(ValueError, match=r"file must be YAML, TOML or a launch script, .*: Python is not read"):
        migrated(tmp_path / "a.py")
    (tmp_path / "a.toml").write_text("\n")
    with pytest.raises(ValueError, match=r"file must hold a mapping of options, but .* is empty"):
        migrated(tmp_path / "a.toml")
