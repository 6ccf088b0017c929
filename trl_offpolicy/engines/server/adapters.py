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
        self._names: dict[int, str] = {}  # by version
        self._replaced: list[str] = []  # of versions that were sent once more
        self._syncs = 0
        self.in_use: Callable[[], Collection[int]] | None = None
        """Returns the versions that requests in flight use; None = a sync finds no request in flight."""

    def new_name(self, version: int) -> str:
        """The server's name for the adapter of a version that is about to be sent. All ranks call it."""
        if version in self._names:
            self._replaced.append(self._names[version])
        self._syncs += 1
        self._names[version] = f"policy-{self._run}-{version}.{self._syncs}"
        return self._names[version]

    def name_of(self, version: int) -> str:
        """The server's name for the adapter of a version that was sent."""
        return self._names[version]

    def load(self, name: str) -> None:
        """Have the server load an adapter, unless it has it.

        Raises:
            Refused: it did not take it.
        """
        version = next(one for one, known in self._names.items() if known == name)
        folder = safe_child(self._folder, f"{self._run}-{version}")
        try:
            self._client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        except Refused as error:
            if "already been loaded" not in str(error):
                raise

    def unload_all_but(self, version: int | None) -> list[str]:
        """Unload what neither ``version`` nor a request in flight uses; returns the folders of what is left."""
        needed = set(() if self.in_use is None else self.in_use()) | {version}
        old = {one: name for one, name in self._names.items() if one not in needed}
        for name in (*self._replaced, *old.values()):
            self._unload(name)
        self._replaced.clear()
        for one in old:
            del self._names[one]
        return [f"{self._run}-{one}" for one in self._names]

    def _unload(self, name: str) -> None:
        try:
            self._client.once("POST", "/v1/unload_lora_adapter", json={"lora_name": name})
        except Exception as error:
            if not (isinstance(error, Refused) and error.status == 404):  # a server that was started anew has none
                logger.warning("The old adapter %s could not be unloaded: %s", name, error)
