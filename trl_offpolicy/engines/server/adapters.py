"""The LoRA adapters of one run on a vLLM server: one for each version, several at a time if requests still use them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from trl_offpolicy.engines.server.client import ServerClient
from trl_offpolicy.engines.server.contact import Refused
from trl_offpolicy.engines.weights.files import safe_child

logger = logging.getLogger(__name__)


class ServerAdapters:
    """Loads the adapters of a run by version, and unloads those that no request uses.

    Each sync has another name, also of the same version: a server that knows a name keeps the weights that it has under
    it, and the blocks of its prefix cache.

    Args:
        client: of the server.
        folder: where the adapters are, as ``RUN-VERSION``.
        run: name of the run.
    """

    def __init__(self, client: ServerClient, folder: Path, run: str) -> None:
        self._client, self._folder, self._run = client, folder, run
        self._versions: dict[str, int] = {}  # of every name that the server may have
        self._names: dict[int, str] = {}  # the newest of each version
        self._syncs = 0
        self.in_use: Callable[[], Collection[int]] | None = None
        """Returns the versions that requests in flight use; None = a sync finds no request in flight."""

    def begin_sync(self) -> None:
        """Count a sync. All ranks call it, before anything that may fail on one of them: their names are the same."""
        self._syncs += 1

    def new_name(self, version: int) -> str:
        """The server's name for the adapter of a version that is about to be sent."""
        name = f"policy-{self._run}-{version}.{self._syncs}"
        self._versions[name], self._names[version] = version, name
        return name

    def name_of(self, version: int) -> str:
        """The server's name for the adapter of a version that was sent."""
        return self._names[version]

    def forget(self, name: str | None) -> None:
        """Take back a :meth:`new_name`, because the adapter could not be sent; None = none was given."""
        if name is None:
            return
        version = self._versions.pop(name)
        older = [one for one, its_version in self._versions.items() if its_version == version]
        del self._names[version]
        if older:
            self._names[version] = older[-1]

    def load(self, name: str) -> None:
        """Have the server load an adapter, unless it has it.

        Raises:
            Refused: it did not take it.
        """
        folder = safe_child(self._folder, f"{self._run}-{self._versions[name]}")
        try:
            self._client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        except Refused as error:
            if "already been loaded" not in str(error):
                raise

    def unload_all_but(self, version: int | None) -> list[str]:
        """Unload what neither ``version`` nor a request in flight uses; returns the folders of what is left."""
        used = set(() if self.in_use is None else self.in_use())
        newest = None if version is None else self._names.get(version)
        for name, its_version in list(self._versions.items()):
            if name == newest or its_version in used:
                continue
            self._unload(name)
            del self._versions[name]
            if self._names.get(its_version) == name:
                del self._names[its_version]
        return [f"{self._run}-{one}" for one in self._names]

    def _unload(self, name: str) -> None:
        try:
            self._client.once("POST", "/v1/unload_lora_adapter", json={"lora_name": name})
        except Exception as error:
            if not (isinstance(error, Refused) and error.status == 404):  # a server that was started anew has none
                logger.warning("The old adapter %s could not be unloaded: %s", name, error)
