"""The trainer's weights that are at hand for a run: the model it began with, and the checkpoints in its folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.diagnosis.attribution.contexts.changes import adapter_changes
from trl_offpolicy.diagnosis.attribution.contexts.precision import Inside
from trl_offpolicy.diagnosis.rescoring import lightning
from trl_offpolicy.rollouts.ahead.local_weights import loaded

AUTO = "auto"
ADAPTER_FILE, MODEL_FILE = "adapter_config.json", "config.json"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin")
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
MOST_OTHERS = 4
"""Earlier weights that an engine may still hold: so many are tested, the latest first."""


@dataclass(frozen=True)
class Snapshot:
    """The trainer's weights after ``step`` optimizer steps.

    Args:
        step: optimizer steps.
        source: folder, a name in the local cache of the Hub, or a checkpoint of Lightning.
        adapter: whether it is a LoRA adapter alone.
    """

    step: int
    source: str
    adapter: bool = False


@dataclass(frozen=True)
class AtHand:
    """What :func:`weights_at_hand` found.

    Args:
        base: model that adapters belong to, and whose tokenizer is used; a folder or a name in the local cache.
        snapshots: in the order of their steps.
    """

    base: str
    snapshots: tuple[Snapshot, ...]


def weights_at_hand(run_dir: Path, info: Mapping[str, Any], model: str = AUTO) -> AtHand | None:
    """The weights of a run that are on this machine; None if there are none. Nothing is downloaded.

    Args:
        run_dir: folder of the run; its ``checkpoint-N`` are used, or Lightning's ``.ckpt`` there or in ``checkpoints``.
        info: ``run.json``; its entry ``model`` is the model that the run began with.
        model: that model instead; "auto" = the one in ``info``.

    Raises:
        FileNotFoundError: ``model`` is given and is not on this machine.
    """
    checkpoints = sorted(_checkpoints(run_dir), key=lambda one: one.step)
    named = str(info.get("model") or "") if model == AUTO else model
    base = _local(named, run_dir)
    if base is None and model != AUTO:
        raise FileNotFoundError(f"--model must be a model on this machine, but got {model}.")
    if base is None:  # an adapter knows its base
        base = next((found for one in checkpoints if (found := _base_of(one, run_dir)) is not None), None)
    if base is None:
        return None
    first = Snapshot(0, base, (Path(base) / ADAPTER_FILE).is_file())
    if first.adapter:
        base = _base_of(first, run_dir)
        if base is None:
            return None
    return AtHand(base, (first, *checkpoints))


def _checkpoints(run_dir: Path) -> Iterator[Snapshot]:
    """Whole models and adapters as transformers, PEFT and Lightning save them; sharded checkpoints are left out."""
    for folder in run_dir.glob("checkpoint-*"):
        match = _CHECKPOINT.fullmatch(folder.name)
        if match is None or not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
            continue
        adapter = (folder / ADAPTER_FILE).is_file()
        if adapter or (folder / MODEL_FILE).is_file():
            yield Snapshot(int(match[1]), str(folder), adapter)
    for path, found in lightning.checkpoints(run_dir):
        yield Snapshot(found.step, str(path), found.adapter is not None)


def _local(name: str, run_dir: Path) -> str | None:
    """The folder of a model, or its name if the local cache of the Hub has it; None if it is not here."""
    if not name:
        return None
    for folder in (Path(name), run_dir / name):
        if any((folder / file).is_file() for file in (ADAPTER_FILE, MODEL_FILE)):
            return str(folder)
    try:
        from transformers import AutoConfig

        AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        return None
    return name


def _base_of(snapshot: Snapshot, run_dir: Path) -> str | None:
    """The model that an adapter was made for; of a whole model, the model itself. A file of Lightning does not tell."""
    if snapshot.source.endswith(lightning.SUFFIX):
        return None
    if not snapshot.adapter:
        return snapshot.source
    config = json.loads((Path(snapshot.source) / ADAPTER_FILE).read_text())
    name, revision = str(config.get("base_model_name_or_path") or ""), config.get("revision")
    return _local(name, run_dir) or (_at_commit(name, revision) if name and revision else None)


def _at_commit(name: str, revision: str) -> str | None:
    """The folder of a model of the Hub at a commit; None if the local cache has it not."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, revision=revision, local_files_only=True)
    except (OSError, ValueError):
        return None


# ------------------------------------------------------------------------------------------------------------- loading


def load(at: Snapshot, base: str) -> Any:
    """The model with these weights, in float32 and in eval mode; on the GPU if there is one."""
    from transformers import AutoModelForCausalLM

    of_lightning = at.source.endswith(lightning.SUFFIX)
    source = base if at.adapter or of_lightning else at.source
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True)
    if of_lightning:
        model = lightning.with_weights(model, lightning.read(at.source))
    elif at.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, at.source)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def load_tokenizer(base: str) -> Any | None:
    """The model's tokenizer; None if the model has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(base, local_files_only=True)
    except (OSError, ValueError):
        return None


def precisions(model: Any, declared: Mapping[str, Any]) -> dict[str, Inside]:
    """Contexts in which the model of :func:`load` may compute as the trainer did, by their name.

    Args:
        model: the model.
        declared: what the trainer declares. A declared 16-bit type may be that of the weights or of autocast alone.
    """
    named = str(declared.get("dtype") or "float32")
    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(named)
    if kind is None:
        return {"float32": nullcontext}
    device = next(model.parameters()).device.type
    return {
        # autocast keeps its copies of the weights, and would not see others that a test puts in their place
        f"autocast to {named}": partial(torch.autocast, device, kind, cache_enabled=False),
        f"weights in {named}": partial(cast, model, kind),
    }


@contextmanager
def cast(model: Any, kind: torch.dtype) -> Iterator[None]:
    """The model with its floating-point weights in another type. They come back as they were."""
    before = {name: value for name, value in model.named_parameters() if value.is_floating_point()}
    kept = {name: value.data for name, value in before.items()}
    try:
        for value in before.values():
            value.data = value.data.to(kind)
        yield
    finally:
        for name, value in before.items():
            value.data = kept[name]


def other_weights(model: Any, at: Snapshot, others: Sequence[Snapshot]) -> dict[str, Inside]:
    """Contexts with other weights that an engine may hold: earlier ones; the adapter off or at another scale.

    Args:
        model: the model of :func:`load`.
        at: its weights.
        others: the other weights of the run; later ones are left out.
    """
    found: dict[str, Inside] = {}
    for other in sorted((one for one in others if one.step < at.step), key=lambda one: -one.step)[:MOST_OTHERS]:
        tensors = _tensors(other)
        if at.adapter and not other.adapter:
            continue  # the adapter's start, which is the model without it
        if set(tensors) <= {name for name, _ in model.named_parameters()} and tensors:
            found[f"stale_weights:those of step {other.step}"] = partial(holding, model, tensors)
    if at.adapter:
        changes = adapter_changes(model)
        off = changes.pop("wrong_adapter:no adapter", None)
        if off is not None:
            began_plain = any(one.step == 0 and not one.adapter for one in others)
            name = "stale_weights:those of step 0, without the adapter" if began_plain else "wrong_adapter:no adapter"
            found[name] = off
        found |= changes
    return found


def _tensors(snapshot: Snapshot) -> dict[str, Tensor]:
    """Tensors of a snapshot by the names that the loaded model has; empty if they cannot be read."""
    from safetensors.torch import load_file

    if snapshot.source.endswith(lightning.SUFFIX):
        return lightning.read(snapshot.source).tensors
    found: dict[str, Tensor] = {}
    for path in sorted(Path(snapshot.source).glob("*.safetensors")):
        found |= load_file(path)
    if not snapshot.adapter:
        return found
    return {re.sub(r"\.(lora_[AB])\.weight$", r".\1.default.weight", name): value for name, value in found.items()}


def holding(model: Any, tensors: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """A context in which some parameters of the model have other values."""
    return loaded(model, tensors)
