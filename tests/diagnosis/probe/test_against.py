"""Two settings of the engine on the same tokens, with log-probs whose distances are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy_policy import make

from trl_offpolicy.diagnosis.attribution.attribute import attribute
from trl_offpolicy.diagnosis.probe.against import (
    Against,
    Answer,
    check_same_policy,
    clustered_mean,
    compare_answers,
    scored_rows,
    with_tested_cause,
)
from trl_offpolicy.diagnosis.probe.options import ProbeOptions
from trl_offpolicy.diagnosis.probe.second import second_options
from trl_offpolicy.diagnosis.probe.setting import parse_arguments, parse_setting

ONE, TWO = {"tensor_parallel_size": 1, "dtype": "float32"}, {"tensor_parallel_size": 2, "dtype": "float32"}


def piece(checksum: str, shape: tuple[int, ...] = (4, 4)) -> dict[str, Any]:
    return {"checksum": checksum, "shape": list(shape), "dtype": "float32", "ordered": True}


def weights(**checksums: str) -> list[dict[str, Any]]:
    pieces = {f"model.layers.{name}.weight": piece(value) for name, value in checksums.items()}
    return [{"pieces": pieces, "tied": {}, "tp_rank": 0, "tp_size": 1, "dtype": "float32"}]


def compared(
    *,
    first: float = 0.0,
    second: float = 0.0,
    decode: float = 0.0,
    settings: tuple[Any, Any] = (TWO, ONE),
    text: str = "tensor_parallel_size=1",
) -> tuple[Against, Any]:
    """Engines whose prompt_logprobs are the trainer's plus noise of these sizes; the first decodes with its own."""
    rng = np.random.default_rng(0)
    evidence = make("none")
    trainer = evidence.old_per_token_logps
    sides = [trainer + size * rng.normal(size=trainer.shape) for size in (first, second)]
    evidence = replace(evidence, sampling_per_token_logps=sides[0] + decode * rng.normal(size=trainer.shape))
    answers = [
        Answer(source="x", logps=side.tolist(), again=side.tolist(), settings=said, weights=weights(one="a"))
        for side, said in zip(sides, settings, strict=True)
    ]
    return compare_answers(evidence, *answers, text=text), evidence


def test_the_second_setting_removes_the_mismatch_so_parallelism_is_tested() -> None:
    found, evidence = compared(first=0.02)
    assert found.matters and found.nearer == "second" and found.cause == "parallelism"
    assert found.removed > 0.99 and found.weights == "equal"
    assert found.settings == (("tensor_parallel_size", "2", "1"),)
    pairs = {pair.name: pair for pair in found.pairs}
    # k3 of normal noise of size s is s^2 / 2
    assert pairs["first_second"].kl_k3 == pytest.approx(0.02**2 / 2, rel=0.15)
    assert pairs["first_trainer"].kl_k3 == pytest.approx(0.02**2 / 2, rel=0.15)
    assert pairs["second_trainer"].kl_k3 == 0 and pairs["decode_prefill"].differ == 0
    assert pairs["first_trainer"].differ == 1 and pairs["first_trainer"].kl_k3_ci95 < 0.5 * 0.02**2 / 2
    attributed = with_tested_cause(attribute(evidence), found)
    assert (attributed.cause, attributed.basis) == ("parallelism", "tested")
    assert attributed.detail == "tensor_parallel_size 2 against 1" and attributed.explained > 0.99
    assert "100% of the mismatch is gone" in attributed.reasons[0]


def test_the_nearer_setting_follows_the_sides() -> None:
    found, _ = compared(second=0.02)
    assert found.matters and found.nearer == "first" and found.cause == ""
    found, _ = compared(first=0.02, second=0.02)
    assert found.matters and found.nearer == "neither" and found.cause == ""


def test_a_setting_that_only_adds_its_own_noise_is_no_cause() -> None:
    """Most of the first one's mismatch stays with the second setting."""
    found, evidence = compared(first=0.02, second=0.015)
    assert found.nearer == "second" and found.removed < 0.75 and found.cause == ""
    assert with_tested_cause(attribute(evidence), found) == attribute(evidence)


def test_other_settings_than_sizes_are_not_parallelism() -> None:
    settings = ({"dtype": "bfloat16"}, {"dtype": "float32"})
    found, _ = compared(first=0.02, settings=settings)
    assert found.nearer == "second" and found.cause == "" and found.settings == (("dtype", "bfloat16", "float32"),)


def test_a_size_that_one_engine_does_not_say_is_no_cause() -> None:
    found, _ = compared(first=0.02, settings=({"dtype": "float32"}, ONE))
    assert found.settings == (("tensor_parallel_size", "not said", "1"),) and found.cause == ""


def test_variables_of_the_second_process_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found, _ = compared(first=0.02, settings=(ONE, ONE), text="OMP_NUM_THREADS=2")
    assert found.settings == (("OMP_NUM_THREADS", "1", "2"),) and found.cause == "parallelism"
    found, _ = compared(first=0.02, settings=(ONE, ONE), text="OMP_NUM_THREADS=1")
    assert found.settings == () and found.cause == ""


def test_at_the_floor_nothing_matters() -> None:
    found, _ = compared(first=1e-7, second=1e-7)
    assert not found.matters and found.nearer == "neither"
    assert found.sentences[0].startswith("The setting does not matter: it moves log-probs by")
    found, _ = compared()
    assert "bit for bit" in found.sentences[0]


def test_what_decoding_changes_by_itself_is_said() -> None:
    found, _ = compared(decode=0.02)
    assert not found.matters
    assert any(sentence.startswith("Decoding token by token differs") for sentence in found.sentences)
    assert {pair.name: pair.kl_k3 for pair in found.pairs}["decode_prefill"] == pytest.approx(0.02**2 / 2, rel=0.15)


# ------------------------------------------------------------------------------------------------------ other policies


def answer(**fields: Any) -> Answer:
    return Answer(source="x", logps=[], **fields)


def test_other_weights_are_an_error_that_names_them() -> None:
    first, second = weights(**{"3": "a", "4": "b", "5": "c"}), weights(**{"3": "a", "4": "x", "5": "y"})
    with pytest.raises(ValueError, match=r"against must hold the same weights .* \(2 tensors\) differ"):
        check_same_policy(answer(weights=first), answer(weights=second))
    assert check_same_policy(answer(weights=first), answer(weights=first)) == "equal"


def test_weights_in_other_pieces_are_compared_through_the_trainer() -> None:
    whole, split = weights(one="a"), [*weights(one="b"), *weights(one="c")]
    equal, differs = ("equal", "272 tensors"), ("different", "layers 3 to 5")
    assert (
        check_same_policy(answer(weights=whole, to_trainer=equal), answer(weights=split, to_trainer=equal)) == "equal"
    )
    with pytest.raises(ValueError, match="only the second engine differs from the trainer: layers 3 to 5"):
        check_same_policy(answer(weights=whole, to_trainer=equal), answer(weights=split, to_trainer=differs))
    unknown = check_same_policy(answer(), answer(to_trainer=("not compared", "the server does not say")))
    assert unknown == "not compared: the server does not say"


def test_another_model_is_an_error_that_names_the_entry() -> None:
    one, other = {"hidden_size": 576, "vocab_size": 9}, {"hidden_size": 64, "vocab_size": 9}
    with pytest.raises(ValueError, match="hidden_size: 576 in the first engine, 64 in the second"):
        check_same_policy(answer(model_config=one), answer(model_config=other))
    with pytest.raises(ValueError, match="the tokenizers differ: a test text has 2 and 3 ids"):
        check_same_policy(answer(tokenizer={"text": [1, 2]}), answer(tokenizer={"text": [1, 2, 3]}))


# ------------------------------------------------------------------------------------------------------------- settings


def test_a_setting_is_arguments_variables_or_a_server() -> None:
    found = parse_setting('--max-num-seqs=1,OMP_NUM_THREADS=2,x={"a": [1, 2], "b": null},dtype=bfloat16')
    assert found.arguments == {"max_num_seqs": 1, "x": {"a": [1, 2], "b": None}, "dtype": "bfloat16"}
    assert found.environment == {"OMP_NUM_THREADS": "2"} and not found.url
    assert parse_arguments("a=True,b=none", where="x") == {"a": True, "b": None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tensor_parallel_size",
            "against must be name=value,... or the URL of a server, but got 'tensor_parallel_size'",
        ),
        ("a=1,a=2", "against must name a once"),
        ("weight_rounding=int8", "against must leave the weights as they are, but got weight_rounding"),
        ("model=other", "against must leave the weights as they are, but got model"),
    ],
)
def test_a_wrong_setting_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProbeOptions(model="m", against=text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "hf"}, "against must be left out with engine hf"),
        ({"engine": "http://a:1"}, "against must be the URL of a second server with engine http://a:1"),
        ({"temperature": 0.7}, "temperature, top_p, top_k and min_p must be left at 1, 1, 0 and 0 with against"),
        ({"engine": "http://a:1/", "against": "http://a:1"}, "against must be another server than engine"),
    ],
)
def test_what_cannot_be_compared_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProbeOptions(**{"model": "m", "against": "max_num_seqs=1", **options})


def test_the_second_engine_differs_by_its_setting_alone() -> None:
    first = ProbeOptions(
        model="m", engine_arguments={"max_num_seqs": 8, "seed": 3}, against="max_num_seqs=1,dtype=bfloat16"
    )
    second = second_options(first)
    assert second.engine_arguments == {"max_num_seqs": 1, "seed": 3} and second.engine_dtype == "bfloat16"
    assert second.against is None and second.engine == "vllm"
    exact = second_options(ProbeOptions(model="m", exact=True, against="OMP_NUM_THREADS=2"))
    assert exact.engine_arguments["enable_prefix_caching"] is False and exact.engine_dtype == "float32"
    assert second_options(ProbeOptions(model="m", against="http://b:2/")).engine == "http://b:2"


# ------------------------------------------------------------------------------------------------------------- numbers


def test_the_interval_is_clustered_by_prompt() -> None:
    values = np.array([[1.0, 2.0], [3.0, np.nan], [5.0, 6.0], [np.nan, np.nan]])
    mean, half = clustered_mean(values, np.array([0, 0, 1, 1]))
    assert mean == pytest.approx(17 / 5)
    # two groups with sums 6 and 11, counts 3 and 2
    spread = 2 / 1 * ((6 - 3.4 * 3) ** 2 + (11 - 3.4 * 2) ** 2)
    assert half == pytest.approx(1.96 * spread**0.5 / 5)
    assert np.isnan(clustered_mean(np.full((2, 2), np.nan), None)[0])


def test_rows_without_a_completion_or_without_room_are_not_scored() -> None:
    assert scored_rows([[1, 2], [1, 2], [3]], [[4], [], [5, 6]], 4) == [[1, 2, 4], [], [3, 5, 6]]
    assert scored_rows([[1, 2], [3]], [[4], [5, 6, 7]], 4) == [[1, 2, 4], []]
