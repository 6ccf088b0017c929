"""The fifth round of kinds. Kinds and answers were written before any of them was scored.

Their author did not see the rules of the attribution, its tests, or what it says of any kind. Two thirds are what users
of RL stacks report (README.md names threads), the others are small, hidden, two at once, or over time. Where no cause
of ``trl_offpolicy.diagnosis.causes`` stands for a fault, "unknown" is right.
"""

from __future__ import annotations

from functools import partial

import contexts
import engine_faults as e
import fifth_contexts as w
import fifth_engine as k
import fifth_trainer as n
import fourth_engine as h
import second_contexts as c
import second_engine as s
import second_trainer as y
import third_engine as g
import trainer_faults as t
from engine_faults import Inject
from kind import ALL, CLEAN, DENSE, OLDER, SMALL, Kind
from sampler import plain, reporting_raw
from time_faults import RunFault
from worlds import World, padded_pass


def prompts() -> list[Kind]:
    def kind(name: str, inject: Inject, *sane: str, models: tuple[str, ...] = DENSE) -> Kind:
        return Kind(name, "prompts", ("prompt_difference",), inject, sane, models)

    return [
        kind(
            "default_system_prompt",
            s.mistaken(
                "the engine's template adds a system prompt",
                g.conversations(h.asked),
                g.conversations(k.asked_by_default),
            ),
        ),
        kind("template_applied_twice", e.gets("the rendered prompt rendered again", k.template_twice)),
        kind("end_token_behind_the_prompt", e.gets("the end token behind the prompt", k.with_end), models=ALL),
        kind(
            "opening_of_the_response_closed",
            s.mistaken(
                "the trainer ends the turn that was begun for the policy",
                g.conversations(h.asked, k.opened_and_closed),
                g.conversations(h.asked, k.opened),
            ),
        ),
        kind("quotes_escaped_by_the_template", e.gets("quotes and brackets escaped as in HTML", k.escaped)),
        kind(
            "tool_turn_rendered_as_the_users",
            s.mistaken(
                "the tool's turn has the user's role in the engine",
                g.conversations(partial(k.tool_answered, role="tool")),
                g.conversations(partial(k.tool_answered, role="user")),
            ),
        ),
    ]


def sampling() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str, hidden: bool = False) -> Kind:
        return Kind(name, "sampling", right, inject, sane, ALL, hidden)

    temperature, processors = ("temperature",), ("logit_processors",)
    return [
        kind("server_ignores_the_temperature", temperature, s.at(0.6, "temperature 1 in place of 0.6", plain())),
        kind("trainer_forgets_the_temperature", temperature, k.forgotten_by_the_trainer(1.2)),
        kind(
            "top_p_beside_a_declared_temperature",
            ("truncated_sampling",),
            s.at(0.8, "temperature 0.8 on both sides, top-p 0.9 in the engine", plain(e.head(0.8, top_p=0.9))),
        ),
        kind(
            "penalty_on_the_last_tokens",
            processors,
            e.draws("repetition penalty 1.15 on the last 16 tokens", lambda _w: k.recent_repetition(1.15, 16)),
        ),
        kind(
            "temperature_by_entropy",
            temperature,
            e.draws("temperature 0.7 to 1.5 by the entropy", lambda _w: k.tempered_by_entropy(0.7, 1.5)),
            *processors,
        ),
        kind(
            "top_choices_excluded",
            processors,
            e.draws("the likeliest choices left out at one token in four", lambda _w: k.top_excluded(0.1, 0.25)),
            "truncated_sampling",
        ),
        kind("responses_answered_from_a_cache", ("repeated_draws",), k.answered_from_a_cache, hidden=True),
        kind(
            "raw_logps_of_a_hot_min_p",
            ("unreported_sampling",),
            e.draws("temperature 1.4, min-p 0.1, raw log-probs", lambda _w: reporting_raw(e.head(1.4, min_p=0.1))),
            "temperature",
            "truncated_sampling",
            hidden=True,
        ),
    ]


def architecture() -> list[Kind]:
    def kind(name: str, inject: Inject, *sane: str, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, "architecture", ("model_config",), inject, sane, models)

    m = e.of_model
    return [
        kind("llama3_rope_scaling", e.computes("Llama 3's scaling of RoPE by 8", m(w.llama3_rope))),
        kind(
            "window_off_by_one",
            k.on_both(
                "a window of 17 tokens in place of 16",
                lambda _w: contexts.attention_logits(window=17),
                lambda _w: contexts.attention_logits(window=16),
            ),
            "compressed_cache",
        ),
        kind(
            "q_k_norms_behind_the_rotary",
            e.computes("norms of q and k behind the rotary embedding", m(w.norms_behind_the_rotary)),
            models=("qwen",),
        ),
        kind("position_table_too_short", e.computes("positions end behind the prompt", k.table_too_short)),
    ]


def precision() -> list[Kind]:
    def kind(name: str, inject: Inject, *sane: str, models: tuple[str, ...] = DENSE) -> Kind:
        return Kind(name, "precision", ("precision",), inject, sane, models)

    m, fp8 = e.of_model, {"quantization": "fp8"}
    return [
        kind("embedding_in_bf16", e.computes("embedding in bf16", m(w.embedding_rounded, contexts.bf16)), models=ALL),
        kind(
            "attention_in_fp8",
            e.computes("projections of the attention in fp8", m(w.attention_rounded, contexts.fp8), **fp8),
        ),
        kind(
            "fp16_engine_and_bf16_trainer",
            k.on_both(
                "fp16 in the engine, bf16 in the trainer",
                e.cast("float16"),
                e.cast("bfloat16"),
                {"dtype": "float16"},
                {"dtype": "bfloat16"},
            ),
        ),
        kind("fp8_weights_and_inputs", e.computes("fp8 by channel and by token", m(w.fp8_products), **fp8)),
        kind(
            "fp8_on_both_sides_with_other_scales",
            k.on_both(
                "fp8 on both sides, the trainer's scales are powers of two",
                m(contexts.weights_rounded, w.fp8_rows),
                m(contexts.weights_rounded, w.fp8_powers),
                fp8,
            ),
        ),
        kind(
            "weights_rounded_at_random",
            e.computes("weights in bf16, rounded at random", m(w.weights_randomly_rounded)),
            "sync_rounding",
            models=ALL,
        ),
    ]


def bookkeeping() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str, hidden: bool = False) -> Kind:
        return Kind(name, "bookkeeping", right, inject, sane, ALL, hidden)

    wrong, tools = ("misalignment",), ("tool_tokens",)
    return [
        kind("end_written_over_the_last_token", wrong, n.end_written_over),
        kind("logps_behind_a_tool_early", (*wrong, *tools), n.early_behind_a_tool),
        kind("logps_in_the_order_of_finishing", wrong, n.as_they_finished),
        kind(
            "minus_infinity_outside_the_top",
            ("nonfinite",),
            t.reports("-inf for tokens outside of the top 20", n.outside_the_top),
            "engine_logprobs_missing",
            hidden=True,
        ),
        kind(
            "cut_behind_a_padded_prompt",
            wrong,
            t.reports("log-probs early by the prompt's padding", n.behind_a_padded_prompt),
        ),
        kind("next_turn_in_the_loss", tools, n.next_turn_in_the_loss, *wrong),
        kind("tool_output_with_its_own_logps", (*tools, "unreported_sampling"), n.with_own_logps, hidden=True),
    ]


def weights() -> list[Kind]:
    adapter, other, stale = ("wrong_adapter",), ("other_weights",), ("stale_weights",)
    exchanged = (*stale, "model_config")

    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, "weights", right, inject, sane, models)

    return [
        kind(
            "adapter_taken_out_twice",
            adapter,
            e.holds("the base less the adapter", lambda world, _n: (e.version_of(world, 0), -1.0)),
            *OLDER,
            *stale,
        ),
        kind(
            "adapter_of_q_and_v_alone",
            (*adapter, *stale),  # the base is both the first version and no adapter
            e.stale_where("the adapter in q and v alone", w.beyond_q_and_v, back=5),
            *OLDER,
            models=DENSE,
        ),
        kind(
            "output_projections_stale",
            stale,
            e.stale_where("o_proj and down_proj stale", lambda _w, name: "o_proj" in name or "down_proj" in name),
            *OLDER,
        ),
        kind(
            "every_second_bucket_dropped", stale, e.stale_where("every second bucket stale", w.bucket_dropped), *OLDER
        ),
        kind(
            "trainer_behind_the_engine",
            (*other, "policy_staleness"),
            t.scores_in("the trainer scores with lag 2", lambda world: world.weights.at(e.version_of(world, 2))),
            *stale,
        ),
        kind("two_layers_exchanged", other, e.computes("layers exchanged", e.of_model(w.layers_exchanged)), *exchanged),
        kind(
            "another_revision_of_the_base",
            other,
            e.computes("a base that differs by 2 %", lambda world: w.other_base(world, 0.02)),
            *stale,
            *adapter,
        ),
        kind(
            "last_group_of_older_weights",
            (*stale, "policy_staleness"),
            h.of_servers(
                "the last group of lag 3",
                [None, lambda world: world.weights.at(e.version_of(world, 3))],
                lambda row: int(row >= 20),
            ),
            *other,
        ),
    ]


def trainer() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str) -> Kind:
        return Kind(name, "trainer", right, inject, sane)

    padding = ("padding",)
    attended = padded_pass(attended=True, positions="all")
    return [
        kind(
            "embedding_noise_left_on",
            ("dropout",),
            t.scores_in("NEFTune's noise in the trainer", e.of_model(w.embedding_noise, 5.0)),
        ),
        kind(
            "padding_attended_in_the_last_micro_batch",
            padding,
            n.from_row_by(12, "padding attended from row 12 on", attended),
        ),
        kind(
            "packed_rows_restart_and_leak",
            padding,
            t.scores_by("every second row sees the row before, positions begin again", n.packed_and_restarted),
            "prompt_difference",
        ),
        kind(
            "siblings_count_in_the_positions",
            padding,
            t.scores_by("positions run on from one response of a prompt to the next", n.shared_prompt(counted=True)),
            "model_config",
        ),
        kind("old_logps_never_filled", ("misalignment", "engine_logprobs_missing"), n.never_filled(4), "unknown"),
    ]


def routing() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str) -> Kind:
        return Kind(name, "routing", right, inject, sane, ("moe",))

    m = e.of_model
    return [
        kind(
            "replay_in_batch_first_order",
            ("routing",),
            t.scores_by("experts of other tokens replayed", n.replayed_in_other_order),
            "misalignment",
        ),
        kind(
            "experts_of_a_rank_lost",
            ("unknown", "parallelism", "other_weights"),
            e.computes("two of eight experts answer nothing", m(w.last_experts_lost, 0.25)),
            "routing",
            "model_config",
        ),
        kind(
            "scale_of_the_experts_ignored",
            ("model_config",),
            t.scores_in("the engine lacks the factor 1.25 of the experts", m(w.experts_scaled, 1.25)),
            "routing",
        ),
    ]


def mixtures() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], inject: Inject, *sane: str, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, "mixtures", right, inject, sane, models)

    def lag_2(world: World) -> object:
        return world.weights.at(e.version_of(world, 2))

    return [
        kind(
            "known_lag_and_temperature",
            ("policy_staleness", "temperature"),
            e.both("lag 2, declared, and temperature 0.9", lag_2, lambda _w: plain(e.head(0.9)), weight_version=3),
            "stale_weights",
            "other_weights",
        ),
        kind(
            "declared_temperature_and_end_token",
            ("prompt_difference",),
            k.tempered_and_seen(0.7, k.with_end),
        ),
        kind(
            "top_p_and_attention_dropout",
            ("truncated_sampling", "dropout"),
            k.drawn_and_scored(
                "top-p 0.9, attention dropout 0.05",
                plain(e.head(top_p=0.9)),
                e.of_model(contexts.attention_dropout, 0.05),
            ),
        ),
        kind("tool_tokens_and_lag", ("tool_tokens", "stale_weights"), n.lagging_and_tools(2), *OLDER),
        kind(
            "llama3_rope_and_bf16",
            ("model_config", "precision"),
            e.computes(
                "Llama 3's scaling of RoPE, bf16",
                e.stack(e.of_model(w.llama3_rope), e.cast("bfloat16")),
                dtype="bfloat16",
            ),
            models=DENSE,
        ),
    ]


def over_time() -> list[Kind]:
    def kind(name: str, right: tuple[str, ...], run: RunFault, *sane: str) -> Kind:
        return Kind(name, "time", right, None, sane, SMALL, run=run)

    return [
        kind(
            "top_p_left_by_evaluations",
            ("truncated_sampling",),
            RunFault("top-p 0.8 in every fourth step", drawing=n.narrow_at_times),
        ),
        kind(
            "one_step_behind_from_the_start",
            ("stale_weights",),
            RunFault("a step behind, unknown", lambda step: max(0, step - 1)),
            *OLDER,
        ),
        kind(
            "padding_attended_after_an_upgrade",
            ("padding",),
            RunFault("padding attended from step 8 on", change=n.padding_attended_later),
        ),
        kind(
            "known_lag_and_a_later_penalty",
            ("policy_staleness", "logit_processors"),
            RunFault(
                "two steps behind, known, and a penalty from step 8 on",
                lambda step: max(0, step - 2),
                known=True,
                drawing=n.penalty_late,
            ),
            "stale_weights",
            "other_weights",
        ),
        kind(
            "rounded_deltas_pile_up",
            ("sync_rounding", "precision"),
            RunFault("each sync adds a change in four bits", inside=w.rounded_deltas),
            *OLDER,
            "stale_weights",
        ),
    ]


def clean() -> list[Kind]:
    def kind(name: str, inject: Inject, models: tuple[str, ...] = ALL) -> Kind:
        return Kind(name, CLEAN, ("none",), inject, (), models)

    def window(_world: World) -> object:
        return contexts.attention_logits(window=16)

    return [
        kind("clean_text_behind_the_end", k.behind_the_end),
        kind("clean_same_temperature_and_min_p", y.same_head(e.head(1.2, min_p=0.05), temperature=1.2, min_p=0.05)),
        kind("clean_same_window", k.on_both("a window of 16 tokens on both sides", window, window)),
        kind(
            "clean_shared_prompt",
            t.scores_by("a prompt once for all of its responses", n.shared_prompt(counted=False)),
        ),
        kind("clean_one_long_response", k.one_long),
        kind("clean_right_padding", t.scores_by("padding on the right", n.padded_on_the_right)),
        kind(
            "clean_routing_replayed",
            t.scores_in("experts replayed as they were", e.of_model(c.routed, w.replayed_as_they_were)),
            ("moe",),
        ),
        kind(
            "clean_neurons_in_another_order", e.computes("neurons in another order", e.of_model(w.neurons_moved)), DENSE
        ),
    ]
