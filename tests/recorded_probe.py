"""What a probe saw, written as a run folder: the same tokens for the probe and for the doctor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trl_offpolicy.diagnosis.probe.probe import ProbeResult
from trl_offpolicy.run_folder.writer import RolloutRecorder, RunFolderWriter


def record_probe(result: ProbeResult, prompt_ids: Sequence[Sequence[int]], folder: Path, *, declared: bool) -> Path:
    """Write the run folder of a run of one step.

    Args:
        result: what the probe found.
        prompt_ids: the prompts, each once.
        folder: where to write.
        declared: whether ``run.json`` says what both sides declare.
    """
    evidence = result.evidence
    rows = [list(ids) for ids in prompt_ids for _ in range(result.options.samples)]
    width = max(map(len, rows))
    left = [[0] * (width - len(ids)) + ids for ids in rows]
    attended = [[0] * (width - len(ids)) + [1] * len(ids) for ids in rows]
    assert evidence.entropies is not None and evidence.token_ids is not None
    assert evidence.engine is not None and evidence.trainer is not None
    sides = {"engine": asdict(evidence.engine), "trainer": asdict(evidence.trainer)}
    writer = RunFolderWriter(folder, {"model": result.options.model, "declared": sides if declared else {}})
    writer.begin(0, seed=0)
    recorder = RolloutRecorder(folder, lambda ids: " ".join(map(str, ids)), rank=0)
    mask = torch.from_numpy(np.asarray(evidence.completion_mask, bool))
    recorder.add(
        0, prompt_ids=torch.tensor(left), prompt_mask=torch.tensor(attended), attention_mask=mask,
        completion_mask=mask, completion_ids=torch.from_numpy(evidence.token_ids),
        sampling_per_token_logps=_tensor(evidence.sampling_per_token_logps),
        old_per_token_logps=_tensor(evidence.old_per_token_logps), entropies=_tensor(evidence.entropies),
        group_id=torch.from_numpy(np.asarray(evidence.group_ids)),
        policy_version=torch.zeros(len(rows), dtype=torch.int64),
    )  # fmt: skip
    recorder.flush()
    kl = result.metrics["mismatch/kl_k3"]
    writer.log(1, {"offpolicy/mismatch/kl_k3": kl, "loss": 0.0})
    assert json.loads((folder / "metrics.jsonl").read_text())["step"] == 1
    return folder


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.nan_to_num(values)).float()
