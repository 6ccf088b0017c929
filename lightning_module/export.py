"""Writes a trained policy as transformers and PEFT read it, with its model card, and uploads it to the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_module import models
from lightning_module.callbacks import run_folder
from trl_offpolicy.diagnosis.report.model_card import write_card
from trl_offpolicy.run_folder.layout import CARD_FILE, METRICS_FILE

MODEL_FOLDER = "model"


class SaveModel(Callback):
    """At the end of training, writes the model with tokenizer and model card, and uploads it if that is asked for.

    A Lightning checkpoint holds optimizer and rollouts too and is read by Lightning alone. This folder is read by
    ``from_pretrained``; with an adapter it holds the adapter.

    Args:
        folder: where to write; None = ``model`` in the run folder.
        push_to_hub: name of a repository on the Hub, ``user/name``, which is made if there is none; None = no upload.
        private: whether a new repository is private; None = the account's default.
    """

    def __init__(self, folder: str | None = None, push_to_hub: str | None = None, private: bool | None = None) -> None:
        self.folder, self.push_to_hub, self.private = folder, push_to_hub, private

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write after the run folder is complete. All ranks gather the weights, the main one writes."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        run = run_folder(trainer)
        folder = Path(self.folder or run / MODEL_FOLDER)
        save_model(pl_module, folder, wrapped=trainer.strategy.model, is_main=trainer.is_global_zero)
        if not trainer.is_global_zero:
            return
        if (run / METRICS_FILE).exists():
            write_card(run, folder / CARD_FILE)
        print(f"model: {folder}", flush=True)
        if self.push_to_hub is not None:
            print(f"uploaded: {upload(folder, self.push_to_hub, private=self.private)}", flush=True)


def save_model(module: Any, folder: Path, *, wrapped: nn.Module | None = None, is_main: bool = True) -> None:
    """Write policy and tokenizer (or processor) for ``from_pretrained``, whole also if sharded. All ranks call it.

    Args:
        module: an :class:`~lightning_module.OffPolicyGRPOModule` with its policy loaded.
        folder: where to write.
        wrapped: the model as the strategy wraps it.
        is_main: True on the rank that writes.
    """
    with models.whole_weights(wrapped), models.zero3_gathered(module.policy):
        state = whole_state(module.policy, keep=is_main)
    if is_main:
        module.policy.save_pretrained(folder, state_dict=state)
        module.generation.prompts.save(folder)


@torch.no_grad()
def whole_state(policy: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Whole parameters on the CPU by their names in the model; what is shared there is shared here.

    Args:
        policy: the model, in a context that gathers what FSDP1 and ZeRO-3 keep in parts.
        keep: False on ranks that take part in gathering only; their result is empty.
    """
    found: dict[str, Tensor] = {}
    by_parameter: dict[int, Tensor] = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        if id(parameter) not in by_parameter:
            value: Any = parameter.detach()
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            if keep:
                by_parameter[id(parameter)] = whole.to("cpu", copy=True)
        if keep:
            found[name.replace(models.FSDP1_PREFIX, "")] = by_parameter[id(parameter)]
    return found | _persistent_buffers(policy) if keep else found


def _persistent_buffers(policy: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong into a checkpoint. No strategy shards them."""
    return {
        f"{path}.{name}".lstrip(".").replace(models.FSDP1_PREFIX, ""): buffer.to("cpu", copy=True)
        for path, module in policy.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def upload(folder: Path, repository: str, *, private: bool | None = None) -> str:
    """Upload a folder to the Hub with the token that ``hf auth login`` saved; returns the address of the commit."""
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repository, private=private, exist_ok=True)
    done = api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Trained with trl-offpolicy")
    return str(done.commit_url)
