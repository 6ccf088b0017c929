"""Kinds of fault in the book-keeping, of the trainer, and over time; and batches without a fault."""

from __future__ import annotations

from functools import partial

import contexts
import engine_faults as e
import time_faults as r
import torch
import trainer_faults as t
from engine_faults import Inject
from kind import ALL, CLEAN, DENSE, OLDER, SMALL, Kind
from sampler import Order
from time_faults import RunFault
from worlds import Made, World, padded_pass


def bookkeeping() -> list[Kind]:
    right = ("misalignment",)

    def kind(name: str, inject: Inject, *sane: str, models: tuple[str, ...] = ALL, more: tuple[str, ...] = ()) -> Kind:
        return Kind(name, "bookkeeping", (*right, *more), inject, sane, models)

    shifts = [
        kind(f"shift_{'late' if step > 0 else 'early'}_{abs(step)}", t.shifted(step)) for step in (1, 2, 3, -1, -2, -3)
    ]
    return [
        *shifts,
        kind("shift_in_a_quarter", t.shifted(1, every=4)),
        kind("swapped_rows_in_group", t.reports("log-probs of the next row of the group", t.rotated_rows(1))),
        kind("swapped_rows_between_groups", t.reports("log-probs of another group's row", t.rotated_rows(4))),
        kind("two_rows_swapped", t.reports("two rows have each other's log-probs", t.two_rows_swapped)),
        kind("cumulative_logps", t.reports("running sums", t.cumulative)),
        kind("mean_logps", t.reports("every token has its row's mean", t.averaged)),
        kind("logps_in_bits", t.reports("log-probs in base 2", lambda _w, x: x / 0.6931471805599453)),
        kind("logps_in_base_10", t.reports("log-probs in base 10", lambda _w, x: x / 2.302585092994046)),
        kind("clipped_logps", t.reports("log-probs not below -3", lambda _w, x: x.clip(-3.0)), "unknown"),
        kind("probabilities", t.reports("probabilities, not logs", lambda _w, x: 2.718281828459045**x)),
        kind("top_token_logps", t.reports("the most likely token's log-prob", t.top_tokens)),
        kind(
            "two_decimals",
            t.reports("log-probs rounded to two decimals", lambda _w, x: x.round(2)),
            "unknown",
            more=("precision",),
        ),
        kind("retokenised", t.retokenised(1), models=DENSE),
        kind("one_row_retokenised", t.retokenised(24, first=7), models=DENSE),
        kind("first_token_lost", t.dropped_first, "prompt_difference"),
        Kind("tool_tokens", "bookkeeping", ("tool_tokens",), t.tool_tokens(1)),
        Kind("tool_tokens_in_a_quarter", "bookkeeping", ("tool_tokens",), t.tool_tokens(4)),
    ]


def trainer() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, "trainer", right, inject, sane, models)

    drop, pad = ("dropout",), ("padding",)
    m = e.of_model
    return [
        kind("attention_dropout", drop, t.scores_in("attention dropout 0.1", m(contexts.attention_dropout, 0.1))),
        kind("mlp_dropout", drop, t.scores_in("MLP dropout 0.1", m(contexts.mlp_dropout, 0.1))),
        kind(
            "lora_dropout",
            drop,
            t.scores_in("LoRA dropout 0.1", lambda w: contexts.adapter_dropout(w.weights, 0.1), dropout=0.1),
            models=DENSE,
        ),
        kind(
            "noisy_kernels",
            ("unknown", "precision", "dropout"),
            t.scores_in("noise of 1 % in linear layers", t.noisy(0.01)),
        ),
        kind("padding_attended", pad, t.scores_by("padding attended", padded_pass(attended=True, positions="all"))),
        kind(
            "left_padding_positions",
            pad,
            t.scores_by("padding counts in the prompt's positions", padded_pass(attended=False, positions="prompt")),
            "model_config",
        ),
        kind("packing_leak", pad, t.scores_by("every second row sees the row before", t.packed), "prompt_difference"),
    ]


def over_time() -> list[Kind]:
    def kind(name: str, right: str, run: RunFault, *sane: str, models: tuple[str, ...] = SMALL) -> Kind:
        return Kind(name, "time", (right,), None, sane, models, run=run)

    half, last = r.STEPS // 2, 3
    return [
        kind(
            "sync_fails_from_half_way",
            "stale_weights",
            RunFault("no sync from half-way on", lambda s: min(s, half)),
            *OLDER,
        ),
        kind(
            "every_second_sync_fails", "stale_weights", RunFault("every second sync fails", lambda s: s - s % 2), *OLDER
        ),
        kind(
            "growing_staleness",
            "policy_staleness",
            RunFault("a queue that grows", lambda s: s - s // 3, known=True),
            "stale_weights",
            "other_weights",
        ),
        kind(
            "constant_lag",
            "policy_staleness",
            RunFault("three steps behind", lambda s: max(0, s - last), known=True),
            "stale_weights",
            "other_weights",
        ),
        kind(
            "sub_ulp_syncs",
            "sync_rounding",
            RunFault("updates below the ulp of an fp8 engine", inside=r.sub_ulp, engine={"quantization": "fp8"}),
            *OLDER,
        ),
        kind("never_synced", "stale_weights", RunFault("the first weights to the end", lambda _s: 0), *OLDER),
        kind(
            "row_retokenised_from_half_way",
            "misalignment",
            RunFault("one row in twelve tokenised again from half-way on", change=r.retokenised_row),
            models=("qwen",),
        ),
        kind("shift_from_half_way", "misalignment", RunFault("a token late from half-way on", change=r.shifted_late)),
        kind(
            "temperature_from_half_way",
            "temperature",
            RunFault("temperature 0.8 from half-way on", drawing=r.cooler_late),
        ),
        kind(
            "int4_from_half_way", "precision", RunFault("int4 from half-way on", inside=r.int4_late), models=("qwen",)
        ),
    ]


def clean() -> list[Kind]:
    def kind(name: str, inject: Inject, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, CLEAN, ("none",), inject, (), models)

    def ordered(fault: str, **order: int) -> Inject:
        return lambda world: Made(fault, world.sample(order=Order(**order)))

    def same_dtype(name: str) -> Inject:
        def inject(world: World) -> Made:
            inside = partial(contexts.cast, world.model, getattr(torch, name))
            batch = world.sample(inside=inside)
            both = {"dtype": name}
            return Made(f"{name} on both sides", batch, world.score(batch, inside=inside), both, both)

        return inject

    def threads(world: World) -> Made:
        before = torch.get_num_threads()
        torch.set_num_threads(3 - min(before, 2))
        try:
            batch = world.sample()
        finally:
            torch.set_num_threads(before)
        return Made("another number of threads", batch)

    def compiled(world: World) -> Made:
        parts = [module for name, module in world.model.named_modules() if name.endswith(".mlp")]
        for part in parts:  # the whole model would be compiled again for each length of the cache: minutes
            part.forward = torch.compile(part.forward, dynamic=True)
        try:
            batch = world.sample()
        finally:
            for part in parts:
                del part.forward
        return Made("an engine with compiled MLPs", batch)

    harmless = padded_pass(attended=False, positions="all")
    return [
        kind("clean", lambda world: Made("nothing", world.sample())),
        kind("clean_bf16_on_both_sides", same_dtype("bfloat16"), DENSE),
        kind("clean_fp16_on_both_sides", same_dtype("float16"), ("qwen",)),
        kind("clean_one_at_a_time", ordered("batches of one", rows=1)),
        kind("clean_batches_of_five", ordered("batches of five", rows=5)),
        kind("clean_chunked_prefill", ordered("prompts in chunks of 7", chunk=7)),
        kind("clean_threads", threads),
        kind("clean_compiled", compiled, ("qwen",)),
        kind("clean_left_padding", t.scores_by("padding counts in all positions", harmless)),
    ]
