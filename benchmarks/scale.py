"""What the kit adds to an optimizer step as ranks are added: collectives, bytes, and time against a plain all-reduce.

    python benchmarks/scale.py [--ranks 2,4,8] [--rounds 15] [--parts NAME,...] [--output benchmarks/scale.json]

Processes over Gloo on this machine, one thread each, a tiny batch of random numbers, no model. Every collective of
torch.distributed is counted while the kit's own functions run. The time of each part is given as a ratio to one
all-reduce of as many bytes in the same rounds of the same processes, because 8 processes on 2 cores say nothing about
milliseconds on a cluster. ``cost`` and ``table`` compute from the counts what 8 to 1024 ranks would add: the table of
docs/scale_out.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import trl_offpolicy as op
from trl_offpolicy.engines.engine import Rollouts, SyncReport
from trl_offpolicy.engines.sync import WeightSync
from trl_offpolicy.engines.weights.source import ModelWeights
from trl_offpolicy.functional.collective import gather_objects, sum_ranks
from trl_offpolicy.integrations._common import over_ranks
from trl_offpolicy.objective.advantages import RLOO, AdvantageInputs
from trl_offpolicy.rollouts.ahead.old_policy import Snapshots
from trl_offpolicy.rollouts.duplicates import duplicate_stats
from trl_offpolicy.rollouts.micro_batches import Splitting
from trl_offpolicy.rollouts.rank_balance import balanced

SIZES = ((8, 16), (16, 16), (8, 32))
"""Responses of a rank and tokens of each, as counted. The second and the third differ from the first in one of them."""
GROUP = 4
GPU_ROWS, GPU_LENGTH = 64, 4096
"""The same, of the table."""
LATENCY, BANDWIDTH = 20e-6, 25e9
"""Assumed, not measured: seconds for each doubling of the ranks, and bytes per second that a rank receives."""
WORLDS = (8, 64, 256, 1024)
EXCHANGED_ROWS, EXCHANGED_LENGTH = 16, 1024
"""Responses of a rank and columns of a completion in the exchange of rows that is counted."""
PARAMETERS, TENSORS = 7e9, 339
"""Of the model of the table, in bfloat16: one of 28 layers, as Qwen2.5-7B."""
RESULTS = Path(__file__).with_suffix(".json")


# -------------------------------------------------------------------------------------------------------- what is run


def make_batch(rank: int, rows: int = SIZES[0][0], length: int = SIZES[0][1]) -> op.PolicyBatch:
    """Random log-probs near each other; the groups of a rank are its own."""
    random = torch.Generator().manual_seed(rank)
    logps = -torch.rand(rows, length, generator=random) - 0.1
    return op.PolicyBatch(
        per_token_logps=logps,
        old_per_token_logps=logps,
        sampling_per_token_logps=logps + 0.05 * torch.randn(rows, length, generator=random),
        completion_mask=torch.arange(length) < torch.randint(2, length + 1, (rows, 1), generator=random),
        advantages=torch.randn(rows, generator=random),
        rewards=torch.rand(rows, generator=random),
        group_ids=rank * rows // GROUP + torch.arange(rows) // GROUP,
    )


def gathered(vector: Tensor) -> Tensor:
    """All-gather along the first axis, as ``accelerator.gather`` does."""
    parts = [torch.empty_like(vector) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, vector.contiguous())
    return torch.cat(parts)


def parts(batch: op.PolicyBatch) -> dict[str, Callable[[], object]]:
    """What the kit adds, each as a call; names as in the table."""
    token_tis = op.Correction(weight=op.TruncateWeight(max_weight=2.0))
    stats = op.Objective(correction=token_tis)(batch).stats
    group = op.Correction(keep=(op.RatioBand(level="group", low=0.9, high=1.1),))
    budget = op.Correction(keep=(op.SecondMomentBudget(budget=0.04),))
    normalised = op.Correction(weight=op.TruncateWeight(max_weight=2.0), normalize="original")
    ids = torch.randint(5, 99, batch.mask.shape, generator=torch.Generator().manual_seed(0))
    rewards = AdvantageInputs(rewards=batch.rewards, group_ids=batch.group_ids)  # type: ignore[arg-type]
    return {
        "diagnostics": lambda: stats.all_reduce(gathered),
        "duplicates": lambda: duplicate_stats(ids, batch.mask, batch.sampling_per_token_logps, group_size=GROUP),
        "advantages": lambda: RLOO()(rewards),
        "group terms": lambda: group(batch),
        "token budget": lambda: budget(batch),
        "normalised weights": lambda: normalised(batch),
        "objects": lambda: gather_objects(None),
        "verl's micro-batch": lambda: over_ranks(stats, dist.group.WORLD),
        "proof of a sync": proof,
        "old policies": old_policies(batch),
    }


def proof() -> object:
    """A sync whose engine answers as the trainer does: what the proof exchanges, without the weights."""
    sync = WeightSync([[5, 6]], lambda ids: [[-1.0]])
    return sync(
        1,
        send=lambda version: SyncReport(version=version, kind="folder", bytes=0, seconds=0.0),
        answer=lambda ids: [[-1.0]],
    )


def old_policies(batch: op.PolicyBatch) -> Callable[[], object]:
    """Log-probs of two old policies, of which each rank keeps its shard; the forwards themselves are not run."""
    kept, model = Snapshots(), torch.nn.Linear(4, 4)
    for version in (0, 1):
        kept.keep(model, version, oldest=0)
    versions = torch.arange(batch.mask.numel()).view(batch.mask.shape) % 2
    return lambda: kept.mixture(model, lambda _: batch.per_token_logps, versions, batch.mask)


# ------------------------------------------------------------------------------------ what depends on the ranks


def exchanged_rows(rank: int) -> dict[str, Tensor]:
    """A generation batch; the completions of every second rank are four times as long."""
    random = torch.Generator().manual_seed(rank)
    shape = (EXCHANGED_ROWS, EXCHANGED_LENGTH)
    longest = EXCHANGED_LENGTH if rank % 2 == 0 else EXCHANGED_LENGTH // 4
    mask = torch.arange(EXCHANGED_LENGTH) < torch.randint(longest // 2, longest + 1, (EXCHANGED_ROWS, 1))
    return {
        "prompt_ids": torch.ones(EXCHANGED_ROWS, 8, dtype=torch.long),
        "prompt_mask": torch.ones(EXCHANGED_ROWS, 8, dtype=torch.long),
        "completion_ids": torch.randint(5, 99, shape, generator=random),
        "completion_mask": mask.long(),
        "sampling_per_token_logps": torch.zeros(shape),
        "old_per_token_logps": torch.zeros(shape),
        "advantages": torch.zeros(EXCHANGED_ROWS),
    }


class FunctionalGathers(TorchDispatchMode):
    """All-gathers of DTensors, which do not go through ``torch.distributed.all_gather``: how many, and bytes given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.given = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.calls, self.given = self.calls + 1, self.given + args[0].nbytes
        return func(*args, **(kwargs or {}))


def counts_by_world(rank: int, world: int) -> dict[str, dict[str, int]]:
    """Calls and bytes of the two exchanges; ``tokens`` are the rank's own, ``weights`` the bytes of the whole model."""
    rows = exchanged_rows(rank)
    with counting() as counter:
        moved, _ = balanced(rows, 4, Splitting(window=4, balance=True))
    if moved is rows:
        raise RuntimeError("the rows must have been exchanged, but stayed")
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    whole = sum(value.nbytes for value in model.parameters())
    mesh = init_device_mesh("cpu", (world,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    with FunctionalGathers() as gathers:
        held = max(full.nbytes for _, full in ModelWeights(model).merged())
    return {
        "rows": {**counter.numbers, "tokens": int(rows["completion_mask"].sum())},
        "weights": {"calls": gathers.calls, "given": gathers.given, "held": held, "weights": whole},
    }


# ----------------------------------------------------------------------------------------------------- counting calls


class Counter:
    """Collectives of a rank: how many, and the bytes that it gives to all-reduces and to gathers."""

    def __init__(self) -> None:
        self.calls = self.reduced = self.gathered = 0

    @property
    def numbers(self) -> dict[str, int]:
        """The counts by name."""
        return {"calls": self.calls, "reduced": self.reduced, "gathered": self.gathered}


@contextmanager
def counting() -> Iterator[Counter]:
    """Count what torch.distributed is asked for. An exchange of objects is counted by the tensors that it moves."""
    counter, kept = Counter(), (dist.all_reduce, dist.all_gather, dist.gather)

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        counter.calls, counter.reduced = counter.calls + 1, counter.reduced + tensor.nbytes
        return kept[0](tensor, *args, **kwargs)

    def all_gather(found: list[Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        counter.calls, counter.gathered = counter.calls + 1, counter.gathered + tensor.nbytes
        return kept[1](found, tensor, *args, **kwargs)

    def gather(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:  # to one rank
        counter.calls, counter.gathered = counter.calls + 1, counter.gathered + tensor.nbytes
        return kept[2](tensor, *args, **kwargs)

    places = (dist, dist.distributed_c10d)  # all_gather_object looks the second one up
    for place in places:
        place.all_reduce, place.all_gather, place.gather = all_reduce, all_gather, gather
    try:
        yield counter
    finally:
        for place in places:
            place.all_reduce, place.all_gather, place.gather = kept


def counts(rank: int, rows: int, length: int) -> dict[str, dict[str, int]]:
    """The counts of every part."""
    found = {}
    for name, call in parts(make_batch(rank, rows, length)).items():
        with counting() as counter:
            call()
        found[name] = counter.numbers
    return found


def ratios(rank: int, rounds: int, wanted: list[str]) -> dict[str, float]:
    """The time of the wanted parts over that of one all-reduce of as many bytes, in turn; medians of rounds."""
    sizes = counts(rank, *SIZES[0])
    found = {}
    for name, call in parts(make_batch(rank)).items():
        if wanted and name not in wanted:
            continue
        plain = torch.zeros(-(-(sizes[name]["reduced"] + sizes[name]["gathered"]) // 8), dtype=torch.float64)
        spent: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for seconds, timed in zip(spent, (call, lambda whole=plain: sum_ranks(whole)), strict=True):
                dist.barrier()
                start = time.perf_counter()
                timed()
                seconds.append(time.perf_counter() - start)
        found[name] = round(statistics.median(spent[0]) / statistics.median(spent[1]), 1)
    return found


def work(rounds: int, wanted: list[str]) -> None:
    """Be one rank; rank 0 prints what it found."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=os.environ["SCALE_STORE"])
    sizes = {f"{rows} x {length}": counts(rank, rows, length) for rows, length in SIZES}
    found = {"counts": sizes, "by_world": counts_by_world(rank, world), "ratios": ratios(rank, rounds, wanted)}
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))


def launch(world: int, rounds: int, wanted: str = "") -> dict[str, Any]:
    """The answer of rank 0 of ``world`` processes; times of the ``wanted`` parts alone, with commas, or of all."""
    with tempfile.TemporaryDirectory() as folder:
        shared = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(world)}
        shared["SCALE_STORE"] = f"file://{folder}/store"
        command = [sys.executable, __file__, "--work", "--rounds", str(rounds), "--parts", wanted]
        started = [
            subprocess.Popen(command, env={**shared, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for rank in range(world)
        ]
        try:
            printed = [process.communicate(timeout=900)[0] for process in started]
        finally:
            for process in started:
                process.kill()
    if any(process.returncode for process in started):
        raise RuntimeError(f"a rank of {world} failed; its error is above")
    found: dict[str, Any] = json.loads(printed[0].splitlines()[-1])
    return found


# --------------------------------------------------------------------------------------------------------- on paper


def bytes_of(counted: dict[str, dict[str, dict[str, int]]], part: str, kind: str) -> tuple[float, float, float]:
    """(a, b, c) of a rank's bytes = a + b rows + c rows tokens, from the three sizes that were counted."""
    (rows, length), (more, _), (_, longer) = SIZES
    small, tall, wide = (counted[f"{r} x {n}"][part][kind] for r, n in SIZES)
    by_token = (wide - small) / (rows * (longer - length))
    by_row = (tall - small) / (more - rows) - by_token * length
    return small - by_row * rows - by_token * rows * length, by_row, by_token


def cost(
    counted: dict[str, dict[str, dict[str, int]]], part: str, *, world: int, rows: int, length: int
) -> dict[str, float]:
    """What a part adds to each rank's step: bytes received and held, seconds by the model in the module's constants.

        received = 2 R + (W - 1) G      held = W G      seconds = calls log2(W) LATENCY + received / BANDWIDTH

    where R and G are the bytes that a rank gives to all-reduces and all-gathers.

    Args:
        counted: ``counts`` of the results.
        part: name of the part.
        world: ranks, W.
        rows: responses of a rank in the step.
        length: tokens of the longest response.
    """
    given = {}
    for kind in ("reduced", "gathered"):
        fixed, by_row, by_token = bytes_of(counted, part, kind)
        given[kind] = fixed + by_row * rows + by_token * rows * length
    received = 2 * given["reduced"] + (world - 1) * given["gathered"]
    calls = next(iter(counted.values()))[part]["calls"]
    seconds = calls * math.log2(world) * LATENCY + received / BANDWIDTH
    return {"calls": calls, "received": received, "held": world * given["gathered"], "seconds": seconds}


def answers(tokens: int = 4096) -> dict[str, float]:
    """Pickled bytes of a sampled token as the main rank sends a server's answers on: in turn, and sampled ahead.

    In turn each rank is sent its own rows (ids, log-probs). Ahead of learning every rank is sent all rows, with the
    version of each token.
    """
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(300, 150_000, (tokens,), generator=random).tolist()
    logps = (-torch.rand(tokens, generator=random)).tolist()
    in_turn = ([ids], [logps], [])
    ahead = Rollouts(
        prompt_ids=[],
        completion_ids=[ids],
        sampling_per_token_logps=[logps],
        policy_versions=[[7] * tokens],
        finish_reasons=["length"],
    )
    sizes = {"in turn": len(pickle.dumps(in_turn)), "ahead": len(pickle.dumps(ahead))}
    return {name: round(size / tokens, 1) for name, size in sizes.items()}


def table(results: dict[str, Any], *, rows: int = GPU_ROWS, length: int = GPU_LENGTH) -> list[str]:
    """Lines of docs/scale_out.md: bytes that a rank holds and milliseconds, for each part and number of ranks."""
    counted = results["worlds"]["2"]["counts"]
    heads = [f"{world} ranks" for world in WORLDS]
    lines = ["| part | calls | " + " | ".join(heads) + " |", "|---" * (2 + len(heads)) + "|"]
    for part in next(iter(counted.values())):
        found = [cost(counted, part, world=world, rows=rows, length=length) for world in WORLDS]
        cells = [f"{size_of(one['held'])}, {one['seconds'] * 1e3:.1f} ms" for one in found]
        lines.append(f"| {part} | {found[0]['calls']:.0f} | " + " | ".join(cells) + " |")
    for name, by_token in results["answers"].items():
        sizes = [size_of(by_token * world * rows * length) for world in WORLDS]
        lines.append(f"| a server's answers, {name} | - | " + " | ".join(sizes) + " |")
    return lines


def table_by_world(results: dict[str, Any], *, rows: int = GPU_ROWS, length: int = GPU_LENGTH) -> list[str]:
    """Lines of docs/scale_out.md for the exchanges that depend on the number of ranks: bytes received, milliseconds.

    An exchange of rows takes a gather of sizes and one of objects for each rank, of as many bytes in all as a rank
    sends. Weights are gathered tensor by tensor; a rank receives what the others hold.
    """
    counted = results["worlds"]["2"]["by_world"]
    by_token = counted["rows"]["gathered"] / (EXCHANGED_ROWS * EXCHANGED_LENGTH)
    heads = [f"{world} ranks" for world in WORLDS]
    lines = ["| part | calls, W ranks | " + " | ".join(heads) + " |", "|---" * (2 + len(heads)) + "|"]
    for name, calls, received in (
        ("row exchange", lambda world: 2 + 2 * world, lambda world: by_token * rows * length),
        ("weights for an engine", lambda world: TENSORS, lambda world: 2 * PARAMETERS * (world - 1) / world),
    ):
        cells = []
        for world in WORLDS:
            seconds = calls(world) * math.log2(world) * LATENCY + received(world) / BANDWIDTH
            cells.append(f"{size_of(received(world))}, {seconds * 1e3:.0f} ms")
        shown = "2 + 2 W" if name == "row exchange" else f"{TENSORS}"
        lines.append(f"| {name} | {shown} | " + " | ".join(cells) + " |")
    return lines


def size_of(count: float) -> str:
    """Three digits and a unit."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def main() -> None:
    """Measure, write the results, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--parts", default="", help="of which times are measured, with commas; others stay in the file")
    parser.add_argument("--output", type=Path, help="the file of results; none = only print")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args.rounds, [name for name in args.parts.split(",") if name])
    worlds = {world: launch(int(world), args.rounds, args.parts) for world in args.ranks.split(",")}
    if args.parts and args.output is not None:
        known = json.loads(args.output.read_text())["worlds"]
        for world, found in worlds.items():
            found["ratios"] = known[world]["ratios"] | found["ratios"]
    results = {"torch": torch.__version__, "cores": os.cpu_count(), "rounds": args.rounds, "worlds": worlds}
    results["answers"] = answers()
    if args.output is not None:
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    for part in worlds[next(iter(worlds))]["ratios"]:
        print(f"{part:20} " + "  ".join(f"{world}: {found['ratios'][part]:6.1f}x" for world, found in worlds.items()))
    if "2" in worlds:  # what the tables are computed from
        print("\n".join([*table(results), "", *table_by_world(results)]))


if __name__ == "__main__":
    main()
