"""Several processes on a CPU: accelerate numbers their device, and ``torch.load`` knows no cpu:1."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import PartialState

from trl_offpolicy.trl.config import OffPolicyGRPOConfig


def test_a_checkpoint_can_be_loaded_to_the_device_of_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered = torch.device("cpu", 1)
    monkeypatch.setitem(PartialState(cpu=True)._shared_state, "device", numbered)
    args = OffPolicyGRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to="none", accelerator_config={"use_configured_state": True}
    )
    torch.save({"exp_avg": torch.ones(3)}, tmp_path / "optimizer.pt")
    with pytest.raises(RuntimeError, match="cpu:1"):
        torch.load(tmp_path / "optimizer.pt", map_location=numbered, weights_only=True)
    state = torch.load(tmp_path / "optimizer.pt", map_location=args.device, weights_only=True)
    assert torch.equal(state["exp_avg"], torch.ones(3))
