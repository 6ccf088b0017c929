"""Weights from the trainer's main rank straight into a server's workers, by collective broadcast.

One process group joins the main rank (rank 0) and every worker of the server (ranks 1, 2, ...): NCCL if the server's
workers and the trainer are on GPUs, Gloo otherwise. Nothing touches a disk. The tensors travel in buckets of bytes. A
header in the group's store announces each (names, dtypes, shapes), so that the receiver needs no list beforehand.

Both ends are in this file: :class:`Sender` for the trainer, :class:`ReceivesWeights` for vLLM's worker.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from datetime import timedelta
from math import prod
from threading import Thread
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from trl_offpolicy.engines.cpu_bugs import quiet_part, whole_load
from trl_offpolicy.engines.engine import SyncError

Backend = Literal["nccl", "gloo"]
BUCKET_BYTES = 256 * 1024**2
_ALIGNMENT = 16  # bytes; the largest element of a dtype, so that a view of the bucket is aligned
_END = "end"


class Entry(NamedTuple):
    """A tensor's place in a bucket. ``dtype`` is torch's name without ``torch.``, ``start`` its first byte."""

    name: str
    dtype: str
    shape: list[int]
    start: int

    def read(self, bucket: Tensor) -> Tensor:
        """The tensor, as a view of the bucket's bytes (uint8)."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return bucket[self.start : self.start + self.nbytes].view(dtype).view(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return prod(self.shape) * dtype.itemsize


class Bucket(NamedTuple):
    """Tensors that travel together, and the bytes that they take."""

    entries: list[Entry]
    tensors: list[Tensor]
    size: int

    def packed(self, device: torch.device) -> Tensor:
        """The bytes (uint8) of all tensors."""
        packed = torch.empty(self.size, dtype=torch.uint8, device=device)
        for entry, tensor in zip(self.entries, self.tensors, strict=True):
            entry.read(packed).copy_(tensor)
        return packed


def buckets(weights: Iterable[tuple[str, Tensor]], limit: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """The weights in buckets of at most ``limit`` bytes, or of one tensor that is larger."""
    entries: list[Entry] = []
    tensors: list[Tensor] = []
    size = 0
    for name, tensor in weights:
        if entries and size + tensor.nbytes > limit:
            yield Bucket(entries, tensors, size)
            entries, tensors, size = [], [], 0
        entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size))
        tensors.append(tensor.detach())
        size += _padded(tensor.nbytes)
    if entries:
        yield Bucket(entries, tensors, size)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def join(store: Any, *, rank: int, size: int, backend: Backend, address: str, timeout: float) -> Any:
    """A process group of its own, beside those of trainer and vLLM.

    Args:
        store: reached by all.
        rank: this process, 0 for the trainer.
        size: number of processes.
        backend: "nccl" or "gloo".
        address: the address of this machine to which Gloo binds; no other is opened.
        timeout: seconds for one step.
    """
    limit = timedelta(seconds=timeout)
    if backend == "nccl":
        over_nccl = dist.ProcessGroupNCCL.Options()
        over_nccl._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, size, over_nccl)
    over_gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    over_gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    over_gloo._timeout = limit
    return dist.ProcessGroupGloo(store, rank, size, over_gloo)


# ---------------------------------------------------------------------------------------------------------- trainer


class Sender:
    """The trainer's end: rank 0 of the group.

    Args:
        call: calls a method of all workers, ``call(name, **arguments)``, and returns or raises when they are done,
            however long that takes.
        address: the address under which the workers reach this machine.
        workers: number of the server's workers; the group has one rank more.
        backend: "nccl", or "gloo" if either side computes on a CPU.
        timeout: seconds for one step of a transfer.

    Raises:
        SyncError: the server's workers did not join.
    """

    def __init__(
        self, call: Callable[..., Any], *, address: str, workers: int, backend: Backend, timeout: float
    ) -> None:
        self._call_workers, self._timeout = call, timeout
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._transfers = 0
        size = workers + 1
        try:
            self._store = _open_store(address, size, timeout)
            joined = self._call(
                "offpolicy_join", host=address, port=self._store.port, size=size, backend=backend, timeout=timeout
            )
            self._wait_for(workers, joined, timeout)
            self._group = join(self._store, rank=0, size=size, backend=backend, address=address, timeout=timeout)
            joined.result()
        except Exception as error:
            raise SyncError(f"The workers of the vLLM server did not join a {backend} group: {error}") from error

    def __call__(self, weights: Iterable[tuple[str, Tensor]], *, part: bool = False) -> int:
        """Send the weights and wait until the workers have loaded them; returns the bytes.

        Args:
            weights: names and tensors.
            part: the workers keep what is not among them.

        Raises:
            SyncError: a worker could not load them, or the connection broke. It may hold a part of the weights.
        """
        self._transfers += 1
        how = {"part": True} if part else {}  # an older worker does not know it
        loaded = self._call("offpolicy_receive", transfer=self._transfers, **how)
        source = buckets(weights)
        total = 0
        try:
            number = 0
            for bucket in source:
                _raise_early(loaded)
                self._announce(number, json.dumps(bucket.entries))
                self._group.broadcast(bucket.packed(self._device), 0).wait()
                total += sum(tensor.nbytes for tensor in bucket.tensors)
                number += 1
            self._announce(number, _END)
            loaded.result(self._timeout)
            for done in range(number + 1):  # the headers of a long run would fill the store
                self._store.delete_key(_key(self._transfers, done))
        except Exception as error:
            for _ in source:  # the other ranks go on gathering
                pass
            raise SyncError(f"The vLLM server did not load what was broadcast: {error}") from error
        return total

    def _wait_for(self, workers: int, joined: Future[Any], timeout: float) -> None:
        """Wait until all workers have found the store, so that no end waits in the group for one that never comes."""
        until = time.monotonic() + timeout
        while self._store.add(_JOINED, 0) < workers:
            _raise_early(joined)
            if time.monotonic() > until:
                raise RuntimeError(f"{self._store.add(_JOINED, 0)} of {workers} came within {timeout:.0f} s.")
            time.sleep(0.02)

    def _announce(self, number: int, header: str) -> None:
        self._store.set(_key(self._transfers, number), header)

    def _call(self, method: str, **kwargs: Any) -> Future[Any]:
        """Call a method of the server's workers without waiting: they wait for what this end does next.

        The thread does not keep the process from ending, as one of a pool would while a worker is stuck.
        """
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._call_workers(method, **kwargs))
            except BaseException as error:
                answer.set_exception(error)

        Thread(target=ask, daemon=True).start()
        return answer

    def close(self) -> None:
        """Close this end; the workers notice when they are asked to join another group."""
        del self._group, self._store


_JOINED = "joined"


def _open_store(address: str, size: int, timeout: float) -> Any:
    """A store that listens on this address only, at a free port."""
    listening = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listening.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        size,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listening.detach(),
    )


def _raise_early(loaded: Future[Any]) -> None:
    """Raise what the workers' call raised, if it ended before everything was sent."""
    if loaded.done():
        loaded.result()
        raise RuntimeError("its workers ended the transfer early.")


def _key(transfer: int, number: int) -> str:
    return f"weights/{transfer}/{number}"


def own_address(host: str, port: int) -> str:
    """The address under which ``host`` reaches this machine: of the interface that leads there."""
    found = sorted(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM))  # IPv4 first
    family, *_, target = found[0]
    if ipaddress.ip_address(target[0]).is_loopback:
        return str(target[0])
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing, only chooses the interface
        probe.connect(target)
        return str(probe.getsockname()[0])


# ----------------------------------------------------------------------------------------------------------- worker


class ReceivesWeights:
    """The server's end, as a part of :class:`~trl_offpolicy.engines.worker.WorkerExtension`."""

    model_runner: Any
    rank: int
    device: Any
    _link: tuple[Any, Any] | None = None

    def offpolicy_join(self, host: str, port: int, size: int, backend: Backend, timeout: float) -> None:
        """Join the trainer's group, in place of an earlier one.

        Args:
            host: address of the trainer's machine, as this one reaches it.
            port: port of its store.
            size: number of processes in the group.
            backend: "nccl" or "gloo".
            timeout: seconds for one step.
        """
        self._link = None
        limit = timedelta(seconds=timeout)
        store = dist.TCPStore(host, port, size, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        store.add(_JOINED, 1)
        address = own_address(host, port)
        group = join(store, rank=1 + self.rank, size=size, backend=backend, address=address, timeout=timeout)
        self._link = store, group

    def offpolicy_receive(self, transfer: int, part: bool = False) -> None:
        """Load what the trainer sends. What cannot be loaded is received to its end, so that the trainer is not stuck.

        Args:
            transfer: its number.
            part: weights that are not sent are to stay as they are.

        Raises:
            RuntimeError: the trainer has not asked this worker to join.
        """
        if self._link is None:
            raise RuntimeError("the worker must join the trainer's group first, but it has not (was it restarted?).")
        store, group = self._link
        device = torch.device("cpu") if isinstance(group, dist.ProcessGroupGloo) else torch.device(self.device)
        weights = received(store, group, transfer, device)
        handed = map(tuple, weights)  # has no close(), by which a loader that fails could end what must be drained
        try:
            with whole_load(self.model_runner.model), quiet_part() if part else nullcontext():
                self.model_runner.reload_weights(weights_iterator=handed)
        finally:
            for _ in weights:
                pass


def received(store: Any, group: Any, transfer: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors in the order in which they were sent; a tensor keeps its whole bucket in memory."""
    number = 0
    while (header := store.get(_key(transfer, number)).decode()) != _END:
        entries = [Entry(*entry) for entry in json.loads(header)]
        last = entries[-1]
        size = last.start + _padded(last.nbytes)
        bucket = torch.empty(size, dtype=torch.uint8, device=device)
        group.broadcast(bucket, 0).wait()
        yield from ((entry.name, entry.read(bucket)) for entry in entries)
        number += 1
