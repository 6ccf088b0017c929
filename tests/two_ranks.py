"""Two real processes over gloo. The test process is rank 0; the test file, run as a script, is rank 1.

A file that uses it defines ``run(rank)`` and ends with ``if __name__ == "__main__": two_ranks.join(run)``. So a single
process has to be started and to import torch.

TRL's trainer sets the process group up itself. A file that runs it on both ranks has ``train(folder, rank)``, calls
``trained`` and ends with ``if __name__ == "__main__": two_ranks.leave(train)``.
"""

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

WORLD, PATIENCE = 2, timedelta(seconds=150)
TESTS = Path(__file__).resolve().parent


def launch(script, run, folder):
    """``[run(0), run(1)]``, each called in a process of its own. The store of rank 0 picks a free port."""
    file = folder / "1.pt"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    environment = _environment()
    command = [sys.executable, script, str(store.port), str(file)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        other = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            mine = _as_rank(0, store, run)
            output, _ = other.communicate(timeout=60)
        except Exception as error:
            other.kill()
            raise AssertionError(f"rank 1 said: {other.communicate()[0]}") from error
    assert other.returncode == 0, output
    return [mine, torch.load(file, weights_only=False)]


def launch_script(script, folder):
    """What two processes print, by rank: ``script`` with ``folder`` as its argument, and torchrun's variables.

    For trainers, which set the process group up themselves: the test process is neither rank.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = _environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    started = [
        subprocess.Popen(
            [sys.executable, script, str(folder)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        printed = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * WORLD, "\n".join(text[-3000:] for text in printed)
    return printed


def trained(script, folder):
    """``[train(folder, 0), train(folder, 1)]`` of ``script``, and what each rank printed; the model is made here."""
    from tiny_models import save_tiny_model

    save_tiny_model(folder / "model")
    printed = launch_script(script, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)], printed


def leave(train):
    """Be one rank of ``trained``, and leave there what ``train(folder, rank)`` returns."""
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.save(train(folder, rank), folder / f"{rank}.pt")


def tiny_trainer(folder, name, rollout_func, *, prompts=None, **options):
    """The kit's TRL trainer on the model of ``trained``, ready to train into ``folder / name``."""
    from tiny_models import score_last_word, tiny_prompts, tiny_tokenizer
    from trainer_runs import tiny_options

    from trl_offpolicy.trl.config import OffPolicyGRPOConfig
    from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

    quick = {"per_device_train_batch_size": 2, "write_report": False, "noise_floor_steps": 0}
    return OffPolicyGRPOTrainer(
        str(folder / "model"),
        score_last_word,
        OffPolicyGRPOConfig(**tiny_options(folder / name, **{**quick, **options})),
        train_dataset=tiny_prompts() if prompts is None else prompts,
        processing_class=tiny_tokenizer(),
        rollout_func=rollout_func,
    )


def _environment():
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **ours}


def join(run):
    """Be rank 1 and leave what ``run(1)`` returns in the file named on the command line."""
    torch.set_num_threads(1)
    port, target = sys.argv[1:]
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=PATIENCE)
    torch.save(_as_rank(1, store, run), target)


def _as_rank(rank, store, run):
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=PATIENCE)
    try:
        return run(rank)
    finally:
        dist.destroy_process_group()
