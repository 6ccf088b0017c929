"""Trains a tiny model in verl's own actor worker (FSDP2 on CPU processes), with this kit's loss in its configuration.

``test_verl_engine.py`` starts one process for each rank, with RANK, WORLD_SIZE and the like in the environment, and
with the file of a request as argument. Rank 0 prints the numbers that verl returns.
"""

import json
import os
import sys
from pathlib import Path

import torch


def configuration(model, lines):
    import verl
    from hydra import compose, initialize_config_dir

    micro = 2
    fixed = [
        f"actor_rollout_ref.model.path={model}",
        "+actor_rollout_ref.model.load_tokenizer=False",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.fsdp_config.strategy=fsdp2",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype: fp32, reduce_dtype: fp32}",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        "actor_rollout_ref.actor.use_torch_compile=False",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro}",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.optim.total_training_steps=10",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={micro}",
        "actor_rollout_ref.rollout.name=hf",
    ]
    folder = Path(verl.__file__).parent / "trainer/config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", overrides=[*fixed, *lines]).actor_rollout_ref


def share_of(batch, rank, ranks):
    """This rank's share of the mini-batch, as a ``DataProto``."""
    from verl import DataProto

    tensors = {name: torch.tensor(values).chunk(ranks)[rank] for name, values in batch.items()}
    return DataProto.from_dict(tensors)


def main():
    request = json.loads(Path(sys.argv[1]).read_text())
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine_workers import ActorRolloutRefWorker
    from verl.workers.utils.padding import left_right_2_no_padding

    torch.distributed.init_process_group("gloo")  # verl would name the CPU twice
    EngineRegistry.register("language_model", ["fsdp2"], device="cpu")(FSDPEngineWithLMHead)
    worker = ActorRolloutRefWorker(configuration(request["model"], request["lines"]), "actor")
    worker.init_model()
    proto = share_of(request["batch"], rank, ranks)
    responses = len(request["batch"]["responses"])
    trainable = proto.batch["response_mask"].clone()
    if request["correction"]:  # verl's own, on the driver
        from verl.trainer.config.algorithm import RolloutCorrectionConfig
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

        correction = getattr(RolloutCorrectionConfig, request["correction"])(**request["options"])
        proto, _ = compute_rollout_correction_and_add_to_batch(proto, correction)
    found = []
    for _ in range(request["steps"]):
        data = left_right_2_no_padding(proto.to_tensordict())
        data["loss_mask"] = trainable  # of verl's V1 trainer, which counts what the correction rejects
        tu.assign_non_tensor(
            data,
            calculate_entropy=False,
            global_batch_size=responses,
            mini_batch_size=responses,
            epochs=1,
            seed=1,
            dataloader_kwargs={"shuffle": False},
            compute_loss=True,
            temperature=1.0,
        )
        output = worker.update_actor(data)
        metrics = tu.get(output, "metrics")
        numbers = {}
        for name, value in metrics.items():
            value = value.aggregate() if hasattr(value, "aggregate") else value
            value = value[0] if isinstance(value, list) and len(value) == 1 else value
            if isinstance(value, int | float):
                numbers[name] = float(value)
        found.append(numbers)
    if rank == 0:
        print("ORACLE", json.dumps(found))


if __name__ == "__main__":
    main()
