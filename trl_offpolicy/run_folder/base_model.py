"""Which model a run began with, in words that hold on any machine: the Hub's id and revision, not a path."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

BASE_MODEL = "base_model"
"""Entry of ``run.json``."""
_SNAPSHOT = re.compile(r"models--([^/\\]+)--([^/\\]+)[/\\]snapshots[/\\]([0-9a-f]{40})")
"""A folder of the Hub's cache."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class BaseModel(NamedTuple):
    """The model that a run began with.

    Args:
        hub_id: ``user/name`` on the Hub: of the model itself, or where ``folder`` is given of the one it was made from;
            empty = not known.
        revision: commit of that repository; empty = not known.
        folder: name of a folder, without its path, if the model was loaded from one; else empty.
    """

    hub_id: str = ""
    revision: str = ""
    folder: str = ""

    def described(self) -> dict[str, str]:
        """The entry of ``run.json``: what is known."""
        return {name: value for name, value in self._asdict().items() if value}

    def markdown(self) -> str:
        """As part of a sentence, with a link; empty if nothing is known."""
        at = f" (revision `{self.revision}`)" if self.revision else ""
        link = f"[{self.hub_id}](https://huggingface.co/{self.hub_id}){at}" if self.hub_id else ""
        if not self.folder:
            return link
        return f"the local model `{self.folder}`" + (f", which was made from {link}" if link else "")


def base_model(name_or_path: str, commit: str | None = None) -> BaseModel:
    """What a model's name or path says of it, with the commit that was loaded if that is known.

    A folder says from what it was made in ``base_model`` of its model card.

    Example:
        >>> base_model("Qwen/Qwen3-0.6B", "c1899de2").markdown()
        '[Qwen/Qwen3-0.6B](https://huggingface.co/Qwen/Qwen3-0.6B) (revision `c1899de2`)'
        >>> base_model("/home/me/models/mine").described()
        {'folder': 'mine'}
    """
    if found := _SNAPSHOT.search(name_or_path):
        return BaseModel(hub_id=f"{found[1]}/{found[2]}", revision=found[3])
    if not name_or_path:
        return BaseModel()
    path = Path(name_or_path)
    if path.is_dir():
        return BaseModel(hub_id=_made_from(path / "README.md"), folder=path.resolve().name)
    if _HUB_ID.fullmatch(name_or_path):
        return BaseModel(hub_id=name_or_path, revision=commit or "")
    return BaseModel(folder=path.name)


def base_model_of_run(info: Mapping[str, Any]) -> BaseModel:
    """The model that the run of this ``run.json`` began with."""
    known = info.get(BASE_MODEL)
    if isinstance(known, Mapping):
        return BaseModel(**{name: str(known[name]) for name in BaseModel._fields if name in known})
    return base_model(str(info.get("model") or ""))


def _made_from(card: Path) -> str:
    if not card.is_file():
        return ""
    from huggingface_hub import ModelCard

    try:
        named = ModelCard(card.read_text(encoding="utf-8"), ignore_metadata_errors=True).data.get("base_model")
    except ValueError:
        return ""
    return named if isinstance(named, str) and _HUB_ID.fullmatch(named) else ""
