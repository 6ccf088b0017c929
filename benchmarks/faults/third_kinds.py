"""The third round of kinds. Kinds and answers were written before any of them was scored.

Their author did not see the rules of the attribution. Each kind is a report of users of RL stacks, or follows from one;
README.md names threads. Large, small, and hidden ones are mixed. Where no cause of ``trl_offpolicy.diagnosis.causes``
stands for a fault, "unknown" is right.
"""

from __future__ import annotations

from functools import partial

import contexts
import engine_faults as e
import second_contexts as c
import second_engine as s
import second_trainer as y
import third_contexts as x
import third_engine as g
import third_trainer as z
import trainer_faults as t
from engine_faults import Inject
from kind import ALL, CLEAN, DENSE, OLDER, SMALL, Kind
from sampler import plain
from time_faults import RunFault
from worlds import World, padded_pass

CALL = '{"name": "add", "arguments": {"a": 17, "b": 25}}'


def prompts() -> list[Kind]:
    def kind(name: str, inject: Inject, *sane: str) -> Kind:
        return Kind(name, "prompts", ("prompt_difference",), inject, sane, DENSE)

    turn = g.conversations(g.said_before)
    return [
        kind(
            "turn_separator_dropped",
            s.mistaken("no newline between two turns", turn, g.conversations(g.said_before, g.without_separator)),
        ),
        kind(
            "thinking_switched_off_in_the_trainer",
            t.sees("an empty block of thoughts in the trainer", g.with_empty_thinking),
        ),
        kind(
            "tool_calls_cleared",
            s.mistaken(
                "the trainer's history lacks the tool call",
                g.conversations(partial(g.called_a_tool, call="")),
                g.conversations(partial(g.called_a_tool, call=CALL)),
            ),
        ),
        kind(
            "bos_in_later_turns",
            s.mistaken("BOS in front of the second turn", turn, g.conversations(g.said_before, g.with_bos_again)),
        ),
        kind(
            "prompt_retokenised",
            e.gets("the prompt's text in other tokens", g.retokenised_prompts),
            "misalignment",
        ),
    ]


def sampling() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str, hidden: bool = False) -> Kind:
        return Kind(name, "sampling", right, inject, sane, ALL, hidden)

    unreported = ("unreported_sampling",)
    return [
        kind(
            "generation_config_defaults",
            ("temperature", "truncated_sampling"),
            e.draws("temperature 0.6, top-k 20, top-p 0.95 of the model's file", lambda _w: g.generation_config()),
        ),
        kind(
            "second_replica_truncates",
            ("truncated_sampling",),
            e.draws("top-k 20 and top-p 0.8 in every second row", lambda _w: g.second_replica_cuts()),
        ),
        kind(
            "bias_left_by_another_request",
            ("logit_processors",),
            e.draws("bias +4 on three tokens in one group", g.bias_left),
        ),
        kind(
            "temperature_falls_along_the_response",
            ("temperature",),
            e.draws("temperature 1.3 at the first token, 0.7 at the last", lambda _w: g.cooling(1.3, 0.7)),
            "logit_processors",
        ),
        kind(
            "greedy_behind_the_thoughts",
            unreported,
            e.draws("the likeliest token from the 13th on", lambda _w: g.greedy_from(12)),
            "temperature",
            hidden=True,
        ),
        kind(
            "raw_logps_under_a_grammar",
            unreported,
            e.draws("digits banned, raw log-probs", lambda w: s.raw_under(e.no_digits(w))),
            "logit_processors",
            hidden=True,
        ),
        kind(
            "zero_logps_of_greedy_rows",
            ("temperature", "truncated_sampling"),
            e.draws("one of four rows at temperature 0, log-probs 0", lambda _w: g.some_greedy()),
            "repeated_draws",
            "unreported_sampling",
        ),
    ]


def architecture() -> list[Kind]:
    def kind(name: str, inject: Inject, *sane: str, more: tuple[str, ...] = ()) -> Kind:
        return Kind(name, "architecture", ("model_config", *more), inject, sane)

    m = e.of_model
    return [
        kind("image_positions_of_a_grid", g.grid_of_an_image, "prompt_difference"),
        kind("interleaved_rope", e.computes("rotary pairs are neighbours", m(x.interleaved_rope))),
        kind("partial_rotary", e.computes("half of the frequencies do not turn", m(x.partial_rotary))),
        kind("prompt_attended_both_ways", e.computes("no causal mask in the prompt", lambda _w: x.both_ways())),
        kind(
            "biases_missing",
            t.scores_in("the engine has no biases of q, k and v", m(x.with_biases, 0.1)),
            "stale_weights",
            more=("other_weights",),
        ),
    ]


def precision() -> list[Kind]:
    def kind(name: str, inject: Inject, *sane: str, models: tuple[str, ...] = ALL, more: tuple[str, ...] = ()) -> Kind:
        return Kind(name, "precision", ("precision", *more), inject, sane, models)

    m = e.of_model
    return [
        kind(
            "experts_in_fp8",
            e.computes("experts in fp8", m(x.experts_rounded, contexts.fp8), quantization="fp8"),
            models=("moe",),
        ),
        kind(
            "fp8_block_scales_shifted",
            e.computes("fp8, some blocks with another's scale", m(x.block_scales_late), quantization="fp8"),
            "stale_weights",
            models=DENSE,
            more=("other_weights",),
        ),
        kind("updates_merged_in_bf16", z.merged_in_bf16, "stale_weights", "other_weights", more=("sync_rounding",)),
        kind("norms_in_bf16", e.computes("norms in bf16", m(x.norms_rounded, contexts.bf16))),
        kind("trainer_log_softmax_in_bf16", t.scores_by("the trainer's log-softmax in bf16", z.rescored(z.in_bf16))),
        kind(
            "rope_tables_in_bf16",
            e.computes("frequencies, cosines and sines in bf16", m(x.rope_tables_rounded, contexts.bf16)),
            "model_config",
        ),
        kind("prefill_in_int8", e.computes("prompts computed in int8", m(x.int8_prefill)), models=DENSE),
    ]


def bookkeeping() -> list[Kind]:
    def kind(name: str, inject: Inject, *sane: str, right: tuple[str, ...] = ("misalignment",)) -> Kind:
        return Kind(name, "bookkeeping", right, inject, sane)

    return [
        kind("logps_reversed", t.reports("log-probs from the end to the beginning", z.flipped)),
        kind("logps_padded_on_the_left", z.padded_on_the_left, "padding", "tool_tokens"),
        kind(
            "late_in_the_second_turn", t.reports("log-probs a token late from the 11th on", z.late_in_the_second_turn)
        ),
        kind(
            "sentinel_for_missing_logps",
            t.reports("-9999 for one in thirty", z.with_sentinels),
            "nonfinite",
            "engine_logprobs_missing",
        ),
        kind(
            "entropies_reported",
            t.reports("minus the entropy in place of the log-prob", z.minus_entropies),
            "unreported_sampling",
        ),
        kind("end_appended_by_the_trainer", z.end_appended, "misalignment", right=("tool_tokens",)),
        kind(
            "logps_of_the_draft",
            z.logps_of_a_draft,
            "other_weights",
            right=("unreported_sampling", "misalignment"),
        ),
    ]


def weights() -> list[Kind]:
    adapter, other, stale = ("wrong_adapter",), ("other_weights",), ("stale_weights",)

    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, "weights", right, inject, sane, models)

    def half_scaled(world: World, name: str) -> tuple[float, float]:
        return e.version_of(world, 0), 8**-0.5 if ".mlp." in name else 1.0

    return [
        kind(
            "rslora_ignored_in_the_mlps",
            adapter,
            e.holds("the adapter's scale too small by the root of its rank in the MLPs", half_scaled),
            *OLDER,
            "stale_weights",
        ),
        kind("both_adapters_active", adapter, e.computes("another adapter on top", x.both_adapters), "other_weights"),
        kind("reference_adapter_left_on", adapter, z.adapter_left_on, "other_weights", "stale_weights"),
        kind(
            "untied_head_stale",
            stale,
            e.stale_where("the head alone is stale", lambda _w, n: n == "lm_head.weight", back=5),
            *OLDER,
            models=SMALL,
        ),
        kind(
            "sparse_sync",
            stale,
            e.computes("of four updates a tenth of the changes arrived", lambda w: x.largest_changes(w, 4, 0.1)),
            *OLDER,
            "sync_rounding",
        ),
        kind(
            "query_heads_in_other_order",
            other,
            e.computes("shards of the query projection in another order", x.query_heads_moved),
            *stale,
            "model_config",
            "parallelism",
        ),
        kind("prefix_cache_of_old_weights", stale, g.old_prefix(4), *OLDER),
        kind(
            "last_update_added_twice",
            other,
            e.computes("the last update added twice", x.added_twice),
            *stale,
            "policy_staleness",
        ),
    ]


def trainer() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str) -> Kind:
        return Kind(name, "trainer", right, inject, sane)

    return [
        kind("layer_drop", ("dropout",), t.scores_in("rows skip one layer in ten", e.of_model(x.layers_dropped, 0.1))),
        kind(
            "zigzag_not_undone",
            ("misalignment",),
            t.scores_by("quarters of a sequence in the order of the ranks", z.zigzag),
            "parallelism",
        ),
        kind(
            "normaliser_of_half_the_vocabulary",
            ("unknown", "parallelism"),
            t.scores_by("the softmax of one of two ranks", z.rescored(z.of_half_the_vocabulary)),
            "model_config",
        ),
        kind(
            "label_smoothing_in_the_trainer",
            ("unknown",),
            t.scores_by("label smoothing 0.05 in the trainer", z.rescored(z.smoothed(0.05))),
            "misalignment",
        ),
        kind("trainer_truncates_alone", ("truncated_sampling",), z.truncated_alone(20), "nonfinite"),
    ]


def routing() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str) -> Kind:
        return Kind(name, "routing", right, inject, sane, ("moe",))

    m = e.of_model
    return [
        kind(
            "experts_of_one_group",
            ("model_config",),
            e.computes("both experts of one of two groups", m(c.routed, x.within_a_group)),
            "routing",
        ),
        kind(
            "selection_bias_not_synced",
            ("routing", "other_weights"),
            t.scores_in("the engine chooses experts without the bias", m(c.routed, x.selected_with_bias(0.05))),
            "stale_weights",
            "model_config",
        ),
        kind(
            "router_temperature",
            ("model_config",),
            e.computes("the router's softmax at temperature 0.8", m(c.routed, x.router_tempered(0.8))),
            "routing",
        ),
        kind(
            "shared_expert_lost",
            ("other_weights", "model_config"),
            t.scores_in("the engine lacks the shared expert", m(x.shared_expert, 0.1)),
            "stale_weights",
            "routing",
        ),
    ]


def mixtures() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, "mixtures", right, inject, (), models)

    fp8 = e.of_model(contexts.weights_rounded, contexts.fp8)
    return [
        kind(
            "fp8_and_generation_config",
            ("precision", "temperature", "truncated_sampling"),
            e.both("fp8 weights, Qwen3's sampling", fp8, lambda _w: g.generation_config(), quantization="fp8"),
            DENSE,
        ),
        kind(
            "stale_and_padding_attended",
            ("stale_weights", "padding"),
            z.lagging_and_scored(2, "lag 2, padding attended", padded_pass(attended=True, positions="all")),
        ),
        kind(
            "other_adapter_and_temperature",
            ("wrong_adapter", "temperature"),
            e.both(
                "another adapter, temperature 1.15", lambda w: w.weights.at("other"), lambda _w: plain(e.head(1.15))
            ),
        ),
        kind(
            "separator_and_dropout",
            ("prompt_difference", "dropout"),
            g.swaps_and(
                "no newline between turns, dropout 0.05",
                g.conversations(g.said_before),
                g.conversations(g.said_before, g.without_separator),
                y.embedding_dropout(0.05),
            ),
            DENSE,
        ),
        kind(
            "routing_and_penalty",
            ("routing", "logit_processors"),
            e.both(
                "routers in bf16, frequency penalty 0.2", e.rough(8, select_only=False), lambda _w: e.frequency(0.2)
            ),
            ("moe",),
        ),
    ]


def over_time() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], run: RunFault, *sane: str) -> Kind:
        return Kind(name, "time", right, None, sane, SMALL, run=run)

    stale = ("stale_weights",)
    return [
        kind(
            "engine_resumed_from_a_checkpoint",
            stale,
            RunFault("five steps behind from step 9 on, unknown", z.resumed),
            *OLDER,
        ),
        kind(
            "lag_that_shrinks",
            ("policy_staleness",),
            RunFault("six steps behind at first, none at last, known", z.shrinking, known=True),
            "stale_weights",
            "other_weights",
        ),
        kind(
            "generation_config_after_an_upgrade",
            ("temperature", "truncated_sampling"),
            RunFault("Qwen3's sampling from step 6 on", drawing=z.config_later),
        ),
        kind(
            "other_prompts_in_every_fifth_step",
            ("prompt_difference", "misalignment"),
            RunFault("another group's prompt in every fifth step", change=z.other_prompts),
        ),
        kind(
            "scoring_worker_updated_in_every_third_step",
            ("other_weights", "policy_staleness"),
            RunFault("the trainer's log-probs are up to two steps old", change=z.kept_for_three_steps),
            "stale_weights",
        ),
        kind(
            "prefix_cache_never_emptied",
            stale,
            RunFault("keys and values of prompts from the first step", inside=z.prefixes_kept),
            *OLDER,
        ),
        kind(
            "logps_of_the_step_before",
            ("misalignment",),
            RunFault("log-probs of the step before from step 5 on", change=z.StepBehind()),
        ),
    ]


def clean() -> list[Kind]:
    def kind(name: str, inject: Inject, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, CLEAN, ("none",), inject, (), models)

    file = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    return [
        kind("clean_recomputed_after_preemption", g.preempted),
        kind("clean_rows_scored_alone", t.scores_by("rows scored alone, the last first", z.one_by_one)),
        kind("clean_adapter_applied_apart", z.same_adapter_apart, DENSE),
        kind("clean_six_decimals", t.reports("log-probs with six decimals", lambda _w, logps: logps.round(6))),
        kind("clean_experts_in_another_order", e.computes("experts in another order", x.experts_permuted), ("moe",)),
        kind(
            "clean_head_in_pieces", e.draws("the normaliser from thirds of the vocabulary", lambda _w: g.head_in_pieces)
        ),
        kind("clean_float64_engine", e.computes("a float64 engine", e.cast("float64"), dtype="float64"), DENSE),
        kind("clean_same_generation_config", y.same_head(e.head(0.6, top_k=20, top_p=0.95), **file)),
        kind("clean_lengths_of_their_own", z.own_lengths),
    ]
