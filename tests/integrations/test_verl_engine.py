"""Steps in verl's own actor worker (FSDP2 on CPU processes): with this kit's loss, and with verl's correction."""

import json
import socket

import pytest
from tiny_models import VOCABULARY, save_tiny_model
from verl_process import HOW, OURS, POLICY_LOSS, PYTHON, answer, made_up_batch, start

from trl_offpolicy.diagnosis.doctor import examine
from trl_offpolicy.run_folder.run_data import read_metrics, read_run_info

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PYTHON is None, reason=HOW)]

PRESET, OPTIONS, STEPS = "decoupled_geo_rs_token_tis", {"is_threshold": 1.2, "rs_threshold": "0.8_1.2"}, 3


def train(folder, ranks, lines, correction=None):
    """verl's metrics of each optimizer step."""
    model = save_tiny_model(folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    batch = {name: values.tolist() for name, values in made_up_batch(len(VOCABULARY)).items()}
    request = {"model": str(model), "batch": batch, "steps": STEPS, "lines": lines}
    path = folder / "request.json"
    path.write_text(json.dumps({**request, "correction": correction, "options": OPTIONS}))
    shared = {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    workers = [
        start("run_verl_engine.py", path, **shared, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(ranks)
    ]
    answers = [answer(worker) for worker in workers]
    return answers[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_steps_are_those_of_verls_own_correction(tmp_path, ranks):
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    run = tmp_path / "run"
    options = ", ".join(f"{name}: {json.dumps(value)}" for name, value in OPTIONS.items())
    named = f"+{POLICY_LOSS}.offpolicy={{preset: verl/{PRESET}, options: {{{options}}}, run_dir: {run}}}"
    ours = train(tmp_path / "ours", ranks, [*OURS, named])
    theirs = train(tmp_path / "theirs", ranks, [], correction=PRESET)

    assert len(ours) == len(theirs) == STEPS
    for mine, verls in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(verls["loss"], rel=1e-4, abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(verls["grad_norm"], rel=1e-4, abs=1e-6)
    assert ours[0]["loss"] != pytest.approx(ours[-1]["loss"], rel=1e-3)  # it learns

    rows = read_metrics(run).rows
    assert [row["step"] for row in rows] == [1, 2, 3]
    whole = made_up_batch(len(VOCABULARY))  # of all ranks and micro-batches, however many
    log_ratio = (whole["old_log_probs"] - whole["rollout_log_probs"])[whole["response_mask"] > 0]
    kl_k3 = (log_ratio.exp() - 1 - log_ratio).mean().item()
    assert rows[0]["offpolicy/mismatch/kl_k3"] == pytest.approx(kl_k3, rel=1e-4)
    assert 0 < rows[0]["offpolicy/keep/dropped_sequence_fraction"] < 1
    assert 0 < rows[0]["offpolicy/weight/truncated_fraction"] < 1
    assert read_run_info(run)["trainer"] == "verl"
    assert examine(run).frameworks == ("trl-offpolicy",)
