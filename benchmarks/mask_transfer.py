"""What it costs to bring the sampling mask (the tokens that the engine kept) from vLLM to the trainer.

    python benchmarks/mask_transfer.py [--rows 8] [--length 1024] [--kept 1 20 200 2000] [--repeats 5]

Every step that vLLM and this kit take is taken, with their own classes and without an engine: sets of random ids of a
vocabulary of 152k. In the trainer's process vLLM makes lists of its arrays and the kit makes tensors of these. A server
sends the arrays from its engine to its front end (msgpack), makes JSON, and the kit reads that. Times are CPU time of
one process, the fastest of the repeats, in ms for 1000 tokens; the wire itself is not timed. "without" is the same
answer without the mask.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionLogProbs, ChatCompletionLogProbsContent
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateResponse, GenerateResponseChoice
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import SamplingMaskLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from trl_offpolicy.engines.kept import read_mask
from trl_offpolicy.engines.server.answers import as_completion, sampled_mask

VOCABULARY = 152_000


def fastest(work: Callable[[], Any], tokens: int, repeats: int) -> float:
    """CPU time in ms for 1000 tokens."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return 1e6 * min(times) / tokens


def to_front_end(arrays: list[list[SamplingMaskLists]] | None, rows: int, length: int) -> tuple[Callable[[], Any], int]:
    """From the engine to the front end, token by token, as the scheduler sends them; and the bytes of all."""
    steps = []
    for place in range(length):
        outputs = [
            EngineCoreOutput(str(row), [1], new_sampling_mask=None if arrays is None else arrays[row][place])
            for row in range(rows)
        ]
        steps.append(EngineCoreOutputs(outputs=outputs))

    def send() -> int:
        encoder, decoder, size = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs), 0
        for step in steps:
            buffers = encoder.encode(step)
            size += sum(memoryview(buffer).nbytes for buffer in buffers)
            decoder.decode([bytes(buffer) for buffer in buffers])
        return size

    return send, send()


def answer(lists: list[list[list[int]]] | None, rows: int, length: int) -> GenerateResponse:
    """The server's answer to one request."""
    content = [ChatCompletionLogProbsContent(token=f"token_id:{i}", logprob=-0.123456789) for i in range(length)]
    choices = [
        GenerateResponseChoice(
            index=row, token_ids=list(range(length)), logprobs=ChatCompletionLogProbs(content=content),
            sampling_mask=None if lists is None else lists[row],
        )
        for row in range(rows)
    ]  # fmt: skip
    return GenerateResponse(model="m", choices=choices)


def measure(kept: int, rows: int, length: int, repeats: int) -> dict[str, float]:
    """Bytes a token and milliseconds for 1000 tokens with ``kept`` ids at each; 0 = without the mask."""
    tokens, random, with_mask = rows * length, np.random.default_rng(0), kept > 0
    ids = np.sort(random.integers(0, VOCABULARY, (rows, length, max(kept, 1)), dtype=np.int32), axis=-1)
    arrays = [[SamplingMaskLists(at) for at in row] for row in ids]

    def as_lists() -> list[list[list[int]]]:  # vLLM's output processor
        return [[at.token_ids.tolist() for at in row] for row in arrays]

    lists = as_lists()
    send, sent = to_front_end(arrays if with_mask else None, rows, length)
    response = answer(lists if with_mask else None, rows, length)
    text = response.model_dump_json().encode()

    def timed(work: Callable[[], Any]) -> float:
        return fastest(work, tokens, repeats)

    found = {
        "msgpack bytes": sent / tokens, "msgpack ms": timed(send),
        "JSON bytes": len(text) / tokens, "JSON made ms": timed(lambda: response.model_dump_json().encode()),
        "JSON read ms": timed(lambda: [as_completion(choice) for choice in json.loads(text)["choices"]]),
    }  # fmt: skip
    if not with_mask:
        return found
    read = [sampled_mask(choice) for choice in json.loads(text)["choices"]]
    for row, mask in zip(lists, read, strict=True):
        assert mask is not None and mask.tolist() == row  # what arrives is what was sent
    stored = sum(mask.ids.nbytes + mask.counts.nbytes for mask in read if mask is not None)
    return found | {
        "lists ms": timed(as_lists), "tensors ms": timed(lambda: [read_mask(row, length) for row in lists]),
        "stored bytes": stored / tokens,
    }  # fmt: skip


def main() -> None:
    """Print one line a number of kept tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--kept", type=int, nargs="+", default=[1, 20, 200, 2000])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    bare = measure(0, args.rows, args.length, args.repeats)
    print("without the mask:", {name: round(value, 3) for name, value in bare.items()})
    for kept in args.kept:
        found = measure(kept, args.rows, args.length, args.repeats)
        print(f"{kept} kept:", {name: round(value, 3) for name, value in found.items()})
        more = {name: found[name] - bare[name] for name in bare}
        here = found["lists ms"] + found["tensors ms"]
        served = more["msgpack ms"] + more["JSON made ms"] + more["JSON read ms"] + here
        print(
            f"   a token: {found['stored bytes']:.0f} bytes in the trainer, {more['JSON bytes']:.0f} more over HTTP; "
            f"for 1000 tokens: {here:.2f} ms in the trainer's process, {served:.2f} ms with a server"
        )


if __name__ == "__main__":
    main()
