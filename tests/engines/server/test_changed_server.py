"""A real vLLM server that gets only what changed: through a folder, by broadcast, and after it was started anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.server.servers import QUICK, Server
from peft import LoraConfig, get_peft_model
from tiny_models import save_tiny_model

from trl_offpolicy.engines.engine import SyncError
from trl_offpolicy.engines.server.engine import ServerEngine
from trl_offpolicy.engines.sync import WeightSync
from trl_offpolicy.engines.weights.files import chain_of
from trl_offpolicy.engines.weights.source import ModelWeights
from trl_offpolicy.rollouts.scoring import sequence_logps

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROBE = [[5, 6, 7, 20, 33, 4], [8, 9, 10, 11]]
AGREE = 2e-4  # nats


@pytest.fixture(scope="module")
def server(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(model_folder(), tmp_path_factory.mktemp("server") / "log").start()
    yield running
    running.kill()


class Trainer:
    """An adapter on a tiny model, and a server that gets it merged."""

    def __init__(self, server: Server, model: Any, folder: Path, transfer: str) -> None:
        options = LoraConfig(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM")
        self.model = get_peft_model(model, options)
        self.engine = ServerEngine(server.url, folder=folder, transfer=transfer, patience=QUICK)  # type: ignore[arg-type]
        self.engine.bind(ModelWeights(self.model))
        self.total = sum(tensor.nbytes for _, tensor in ModelWeights(self.model).merged())
        self.prove, self.version = WeightSync(PROBE, self.score), 0

    def score(self, ids: Any) -> list[list[float]]:
        return sequence_logps(self.model, ids, pad=0)

    def sync(self) -> Any:
        """A step and its sync."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
        self.version += 1
        ways = {"send": self.engine.sync_weights, "answer": self.engine.score, "confirm": self.engine.confirm}
        return self.prove(self.version, **ways)

    def apart(self) -> float:
        own, its = self.score([[40, 41, 42, 43]]), self.engine.score([[40, 41, 42, 43]])
        return max(abs(a - b) for a, b in zip(own[0], its[0], strict=True))


@pytest.mark.parametrize("transfer", ["folder", "broadcast"])
def test_only_changed_weights_travel_and_the_server_agrees(server, fresh_model, tmp_path, transfer):
    trainer = Trainer(server, fresh_model(), tmp_path / "w", transfer)
    first, *later = [trainer.sync() for _ in range(3)]
    assert first.whole and first.bytes >= trainer.total
    for report in later:
        assert not report.whole and 0 < report.bytes < trainer.total / 2 and report.agreement > 1 - AGREE
    assert trainer.apart() < AGREE
    trainer.engine.close()
    assert not (tmp_path / "w").exists()
    # another trainer's weights are on it now: nothing of this one's is taken for granted
    other = Trainer(server, fresh_model(), tmp_path / "v", transfer)
    assert other.sync().whole and other.apart() < AGREE
    other.engine.close()
    assert trainer.sync().whole and trainer.apart() < AGREE


def test_a_server_that_was_started_anew_gets_the_base_and_what_changed(server, fresh_model, tmp_path):
    trainer = Trainer(server, fresh_model(), tmp_path / "w", "folder")
    trainer.sync(), trainer.sync()
    server.kill()
    server.start()
    assert trainer.apart() < AGREE  # between two syncs
    server.kill()
    server.start()
    report = trainer.sync()  # and at one
    assert not report.whole and trainer.apart() < AGREE
    kept = {path.name for path in (tmp_path / "w").iterdir() if path.is_dir()}
    run = trainer.engine.run
    assert kept == {f"{run}-1", f"{run}-2", f"{run}-3"}
    assert [path.name for path in chain_of(tmp_path / "w" / f"{run}-3")] == [f"{run}-1", f"{run}-3"]
    trainer.engine.close()


def test_another_model_is_refused(server, fresh_model, tmp_path):
    trainer = Trainer(server, fresh_model(), tmp_path / "w", "folder")
    trainer.sync(), trainer.sync()
    server.kill()
    own, server.model = server.model, save_tiny_model(tmp_path / "other", num_hidden_layers=3)
    try:
        server.start()
        with pytest.raises(SyncError, match="runs another model"):
            trainer.sync()
    finally:
        server.kill()
        server.model = own
        server.start()
    trainer.engine.close()
