"""What passes to the engine in a sync: shares of changed and visible elements, and the checksum."""

import math

import pytest
import torch
from tiny_models import tiny_model

from trl_offpolicy.engines.rounding import WeightRounding
from trl_offpolicy.engines.sync_watch import SAMPLE, Passed, Precision, SyncWatch, WatchedSource, _stride, torch_dtype
from trl_offpolicy.engines.weights.source import Adapter, ModelWeights

BF16 = Precision(torch.bfloat16)


def passed(watch, named, precision=BF16):
    watch.begin(precision)
    out = list(watch.passing(iter(named)))
    assert [name for name, _ in out] == [name for name, _ in named]
    return watch.end()


def weights(seed=0, rows=300, columns=96):
    generator = torch.Generator().manual_seed(seed)
    return {"linear": 0.02 * torch.randn(rows, columns, generator=generator), "norm": torch.ones(40)}


def test_the_shares_are_those_of_all_elements_by_hand():
    before = weights(rows=10)  # small enough that every element is watched
    after = {name: value.clone() for name, value in before.items()}
    after["linear"][:5] += 2e-5  # seen where bfloat16 is fine enough
    after["norm"] += 1e-5  # never seen: its spacing at 1 is 2^-7
    watch = SyncWatch()
    first = passed(watch, list(before.items()))
    second = passed(watch, list(after.items()))
    pairs = [(before[name], after[name]) for name in before]
    moved = [a != b for a, b in pairs]
    seen = [(a.bfloat16() != b.bfloat16()) & m for (a, b), m in zip(pairs, moved, strict=True)]
    assert first.changed is first.visible is None and first.checksum
    assert sum(m.sum() for m in moved) == 520 and 0 < seen[0].sum() < 480 and seen[1].sum() == 0
    assert second.changed == pytest.approx(520 / 1000)
    assert second.visible == pytest.approx(int(seen[0].sum()) / 520)
    assert (second.trainer_dtype, second.engine_dtype) == ("float32", "bfloat16")


def test_a_sample_stands_for_the_whole():
    before = weights(rows=4000)
    after = {name: value + 1e-5 for name, value in before.items()}
    watch = SyncWatch()
    passed(watch, list(before.items()))
    found = passed(watch, list(after.items()))
    exact = (before["linear"].bfloat16() != after["linear"].bfloat16()).double().mean().item()
    assert found.changed == 1.0
    assert found.visible == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / SAMPLE))
    assert 0.05 < exact < 0.5


def test_an_update_of_the_size_of_the_weights_is_seen():
    watch = SyncWatch()
    passed(watch, list(weights(0).items()))
    assert passed(watch, [("linear", weights(1)["linear"]), ("norm", 2 * torch.ones(40))]).visible > 0.99


@pytest.mark.parametrize(
    ("dtype", "engine", "known"),
    [(torch.float32, torch.float32, False), (torch.bfloat16, torch.bfloat16, False),
     (torch.bfloat16, torch.float32, False), (torch.float32, None, False), (torch.float32, torch.float16, True)],
)  # fmt: skip
def test_an_engine_that_holds_the_trainers_precision_sees_everything(dtype, engine, known):
    watch = SyncWatch()
    passed(watch, [("w", torch.full((8,), 0.1, dtype=dtype))], Precision(engine))
    found = passed(watch, [("w", torch.full((8,), 0.2, dtype=dtype))], Precision(engine))
    assert found.changed == 1.0 and (found.visible == 1.0 if known else found.visible is None)


@pytest.mark.parametrize(("update", "low", "high"), [(1e-6, 0.0, 0.3), (0.02, 0.9, 1.0)])
def test_rounded_weights_hide_small_updates(update, low, high):
    """Although nearly every element differs a little after the scale of its row has moved."""
    before, watch = weights(columns=64)["linear"], SyncWatch()
    after = before + update * torch.sign(torch.randn(before.shape, generator=torch.Generator().manual_seed(1)))
    precision = Precision(torch.float32, WeightRounding("int8"))
    passed(watch, [("mlp.weight", before)], precision)
    found = passed(watch, [("mlp.weight", after)], precision)
    rounded = [WeightRounding("int8")(one) for one in (before, after)]
    assert found.changed == 1.0 and (rounded[0] != rounded[1]).double().mean() > 0.9
    assert low <= found.visible <= high


def test_nothing_changed_is_not_a_share_of_zero():
    watch = SyncWatch()
    first = passed(watch, list(weights().items()))
    again = passed(watch, list(weights().items()))
    assert again.changed == 0.0 and again.visible is None and again.checksum == first.checksum


def test_the_checksum_is_of_what_the_engine_holds():
    named, moved = weights(), {name: value + 1e-9 for name, value in weights().items()}
    watch, exact = SyncWatch(), SyncWatch()
    assert passed(watch, list(named.items())).checksum == passed(watch, list(moved.items())).checksum
    wide = Precision(torch.float32)
    assert passed(exact, list(named.items()), wide).checksum != passed(exact, list(moved.items()), wide).checksum
    # two elements that change places
    swapped = {**named, "norm": torch.tensor([2.0, 1.0])}
    other = {**named, "norm": torch.tensor([1.0, 2.0])}
    assert passed(watch, list(swapped.items())).checksum != passed(watch, list(other.items())).checksum


def test_a_weight_that_passes_twice_counts_once_and_other_weights_start_anew():
    watch, named = SyncWatch(), list(weights().items())
    passed(watch, named + named)
    assert passed(watch, named).changed == 0.0
    assert passed(watch, named[:1]).changed is None  # e.g. from now on the adapter alone


def test_outside_of_a_sync_nothing_is_looked_at():
    watch = SyncWatch()
    list(watch.passing(iter(weights().items())))
    assert watch.end().checksum is None
    watch.begin()
    assert watch.end() == Passed()


def test_the_sample_is_taken_before_the_weight_changes_in_place():
    watch, weight = SyncWatch(), torch.ones(16)
    passed(watch, [("w", weight)])
    weight += 1.0
    assert passed(watch, [("w", weight)]).visible == 1.0


def test_every_column_is_met():
    for size, columns in ((576 * 576, 576), (49152 * 576, 576), (1536 * 576, 576), (7, 7)):
        step = _stride(size, columns)
        assert step == 1 or math.gcd(step, columns) == 1
        assert size / step <= SAMPLE
        assert step <= 1.1 * math.ceil(size / SAMPLE) + 3


def test_an_adapter_that_is_sent_alone_is_watched():
    watch = SyncWatch()

    class Source:
        is_main, extra = True, 5

        def __init__(self):
            self.tensors = {"a.lora_A.weight": torch.ones(2, 4)}

        def merged(self):
            return iter(())

        def adapter(self):
            return Adapter({}, self.tensors)

    source = Source()
    watched = WatchedSource(source, watch)
    assert watched.is_main and watched.extra == 5
    watch.begin(BF16)
    assert watched.adapter().tensors is source.tensors
    watch.end()
    source.tensors = {"a.lora_A.weight": torch.ones(2, 4) + 1e-4}
    watch.begin(BF16)
    watched.adapter()
    found = watch.end()
    assert (found.changed, found.visible) == (1.0, 0.0)


def test_a_merged_adapter_changes_the_weights_that_it_adapts():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    watch = SyncWatch()
    source = WatchedSource(ModelWeights(model), watch)
    for _ in range(2):
        watch.begin(BF16)
        names = {name: tensor.numel() for name, tensor in source.merged()}
        found = watch.end()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(1.5)
    adapted = sum(size for name, size in names.items() if "q_proj.weight" in name)
    assert found.changed == pytest.approx(adapted / sum(names.values()), rel=0.02)
    assert found.visible > 0.5


def test_dtypes_by_name():
    assert torch_dtype(torch.float16) is torch.float16
    assert torch_dtype("bfloat16") is torch_dtype("torch.bfloat16") is torch.bfloat16
    assert torch_dtype("auto") is torch_dtype(None) is torch_dtype("nn") is None
