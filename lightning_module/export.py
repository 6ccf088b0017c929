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
from trl_offpolicy.rollouts.model_parts import is_flattened
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
    with models.whole_weights(wrapped), models.zero3_gathered(module.policy, wrapped):
        state = whole_state(module.policy, keep=is_main)
    if is_main:
        module.policy.save_pretrained(folder, state_dict=state)
        if models.is_adapted(module.policy) and is_flattened(module.policy):
            _write_adapter(module.policy, folder, state)
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
            found[_plain(name)] = by_parameter[id(parameter)]
    return found | _persistent_buffers(policy) if keep else found


def _write_adapter(policy: Any, folder: Path, state: dict[str, Tensor]) -> None:
    """Write the adapter's weights in place of the file that PEFT has just written.

    PEFT takes from a state those names that begin as parts of the model do, and FSDP1 has changed these, so its file is
    empty. It is asked again with the names as they are now, and what it takes is written under those of the model.

    Args:
        policy: an adapted model, parts of which FSDP1 wraps.
        folder: of the file.
        state: what :func:`whole_state` returned.
    """
    from peft import get_peft_model_state_dict
    from peft.utils import SAFETENSORS_WEIGHTS_NAME
    from safetensors.torch import save_file

    names = [name for name, _ in policy.named_parameters()]
    found = get_peft_model_state_dict(policy, state_dict={name: state[_plain(name)] for name in names})
    tensors = {_plain(name): value.contiguous() for name, value in found.items()}
    save_file(tensors, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})


def _plain(name: str) -> str:
    return name.replace(models.FSDP1_PREFIX, "")


def _persistent_buffers(policy: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong into a checkpoint. No strategy shards them."""
    return {
        _plain(f"{path}.{name}".lstrip(".")): buffer.to("cpu", copy=True)
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
