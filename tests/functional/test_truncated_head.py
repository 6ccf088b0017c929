"""The tiled head against the formula on full logits: values, gradients, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl_offpolicy.functional.truncated_head import TruncatedLogProbs, _add_product, truncated_log_probs
from trl_offpolicy.functional.truncated_sampling import KeptIds, Truncation, truncated_support

N, H, V = 13, 5, 31
CUTS = [
    Truncation(),
    Truncation(top_p=0.6),
    Truncation(top_k=7),
    Truncation(min_p=0.2),
    Truncation(top_p=0.8, top_k=9, min_p=0.02),
]
MODELS: list[dict[str, Any]] = [{}, {"temperature": 0.7, "logit_scale": 1.3}, {"softcap": 2.0, "temperature": 1.5}]


def inputs(dtype: torch.dtype = torch.float64, *, grad: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    tensors = torch.randn(N, H, dtype=dtype), torch.randn(V, H, dtype=dtype), 0.3 * torch.randn(V, dtype=dtype)
    hidden, weight, bias = (tensor.requires_grad_(grad) for tensor in tensors)
    return hidden, weight, bias, torch.randint(V, (N,))


def on_full_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    *,
    truncation: Truncation,
    kept_ids: KeptIds | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> TruncatedLogProbs:
    """Formula by autograd: set the dropped logits to -inf, log_softmax."""
    logits = (hidden @ weight.T + bias) * logit_scale
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    kept = truncated_support(logits, truncation).weights(logits) > 0
    for row, ids in enumerate([] if kept_ids is None else kept_ids.tolist()):
        if ids:
            kept[row] = torch.tensor([token in ids for token in range(len(weight))])
    outside = ~kept.gather(1, targets[:, None])
    kept = kept.scatter(1, targets[:, None], True)
    logps = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    probs = logps.exp()
    entropy = -(probs * logps.masked_fill(~kept, 0.0)).sum(-1)
    return TruncatedLogProbs(logps.gather(1, targets[:, None])[:, 0], entropy, (probs**2).sum(-1), outside[:, 0])


def check_same(ours: TruncatedLogProbs, expected: TruncatedLogProbs, leaves: tuple[Tensor, ...]) -> None:
    """All values, and the gradients of log-probs and entropies by the leaves."""
    for name, value in expected._asdict().items():
        torch.testing.assert_close(getattr(ours, name), value, rtol=1e-12, atol=1e-12)
    up = torch.randn(2, N, dtype=torch.float64)
    mine = torch.autograd.grad((up[0] * ours.log_probs + up[1] * ours.entropies).sum(), leaves)
    theirs = torch.autograd.grad((up[0] * expected.log_probs + up[1] * expected.entropies).sum(), leaves)
    for value, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("tile", [1, 4, 128])
def test_values_and_gradients_are_those_of_the_full_logits(cut: Truncation, model: dict, tile: int) -> None:
    hidden, weight, bias, targets = inputs()
    ours = truncated_log_probs(hidden, weight, targets, bias=bias, truncation=cut, tile=tile, **model)
    expected = on_full_logits(hidden, weight, bias, targets, truncation=cut, **model)
    check_same(ours, expected, (hidden, weight, bias))
    assert not ours.sum_sq_probs.requires_grad
    if cut and cut.min_p != 0.2:
        assert ours.outside.any()  # targets are random: the rule for tokens that the trainer would cut is exercised


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("only", ["log_probs", "entropies"])
def test_gradcheck(cut: Truncation, only: str) -> None:
    hidden, weight, bias, targets = inputs()

    def output(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out = truncated_log_probs(
            hidden, weight, targets, bias=bias, temperature=0.8, softcap=3.0, truncation=cut, tile=4
        )
        value: Tensor = getattr(out, only)
        return value

    assert torch.autograd.gradcheck(output, (hidden, weight, bias))


def reported(*unknown: int) -> KeptIds:
    """Sets of one to five ids, drawn without regard for the logits, with the target or without; none where unknown."""
    generator = torch.Generator().manual_seed(3)
    sets = [torch.randperm(V, generator=generator)[: 1 + row % 5].tolist() for row in range(N)]
    return KeptIds.of([[] if row in unknown else ids for row, ids in enumerate(sets)])


@pytest.mark.parametrize("unknown", [(), (0, 7), tuple(range(N))], ids=["all known", "two unknown", "none known"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("tile", [5, 128])
def test_a_reported_kept_set_is_replayed(cut: Truncation, unknown: tuple[int, ...], tile: int) -> None:
    """Log-softmax over the listed ids and the target; the rule of the truncation where nothing is listed."""
    hidden, weight, bias, targets = inputs()
    kept = reported(*unknown)
    ours = truncated_log_probs(hidden, weight, targets, bias=bias, truncation=cut, kept_ids=kept, tile=tile)
    expected = on_full_logits(hidden, weight, bias, targets, truncation=cut, kept_ids=kept)
    check_same(ours, expected, (hidden, weight, bias))


def test_a_set_far_below_the_most_likely_token_does_not_overflow() -> None:
    """The sampler may be another policy by far: its tokens lie 200 nats below the trainer's first choice."""
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[200.0], [1.0], [0.0], [-300.0]], requires_grad=True)
    kept = KeptIds.of([[1, 2]])
    out = truncated_log_probs(hidden, weight, torch.tensor([2]), kept_ids=kept)
    expected = torch.tensor([1.0, 0.0]).log_softmax(0)
    torch.testing.assert_close(out.log_probs.detach(), expected[1:])
    torch.testing.assert_close(out.entropies.detach(), -(expected.exp() * expected).sum(0, keepdim=True))
    (out.log_probs + out.entropies).sum().backward()
    assert weight.grad is not None and hidden.grad is not None
    assert weight.grad[[0, 3]].abs().max() == 0 and weight.grad[[1, 2]].abs().min() > 0
    assert hidden.grad.isfinite().all()


def test_the_masks_of_other_positions_give_other_numbers() -> None:
    hidden, weight, bias, targets = inputs()
    kept = reported()
    shifted = KeptIds.joined([kept[1:], kept[:1]])
    right, wrong = (
        truncated_log_probs(hidden, weight, targets, bias=bias, kept_ids=ids).log_probs for ids in (kept, shifted)
    )
    assert float((right - wrong).abs().mean()) > 0.1


def test_probabilities_sum_to_one_over_the_kept_set_also_with_ties() -> None:
    """Nine tokens, eight tied at the edge; top-p keeps three of them. Their share is what makes the sum one."""
    weight = torch.tensor([[2.0]] + [[0.0]] * 8, dtype=torch.float64)
    hidden = torch.ones(9, 1, dtype=torch.float64, requires_grad=True)
    probs = weight[:, 0].softmax(0)
    cut = Truncation(top_p=float(probs[0] + 2.5 * probs[1]))
    out = truncated_log_probs(hidden, weight, torch.arange(9), truncation=cut)
    assert not out.outside.any()
    p = out.log_probs.exp().detach()
    assert p[0] + 3 * p[1] == pytest.approx(1.0)
    torch.testing.assert_close(out.sum_sq_probs, (p[0] ** 2 + 3 * p[1] ** 2).expand(9))
    torch.testing.assert_close(out.entropies.detach(), (-p[0] * p[0].log() - 3 * p[1] * p[1].log()).expand(9))


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_wanted_gradients_are_made(needs: tuple[bool, bool, bool]) -> None:
    hidden, weight, bias, targets = inputs(grad=False)
    leaves = [value.requires_grad_(need) for value, need in zip((hidden, weight, bias), needs, strict=True)]
    truncated_log_probs(hidden, weight, targets, bias=bias, truncation=CUTS[1]).log_probs.sum().backward()
    assert [leaf.grad is not None for leaf in leaves] == list(needs)


def test_half_precision_projection_wide_statistics() -> None:
    """bf16 states: the projection is bf16, as the engine's; everything after it float32."""
    hidden, weight, bias, targets = inputs(torch.bfloat16)
    out = truncated_log_probs(hidden, weight, targets, bias=bias, truncation=CUTS[1])
    assert out.log_probs.dtype == out.entropies.dtype == out.sum_sq_probs.dtype == torch.float32
    logits = torch.addmm(bias, hidden, weight.T).float()
    kept = truncated_support(logits, CUTS[1]).weights(logits) > 0
    expected = logits.masked_fill(~kept.scatter(1, targets[:, None], True), -torch.inf).log_softmax(-1)
    torch.testing.assert_close(out.log_probs, expected.gather(1, targets[:, None])[:, 0], rtol=0, atol=1e-6)
    (out.log_probs.sum() + out.entropies.sum()).backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16
    wide = [value.detach().float().requires_grad_() for value in (hidden, weight, bias)]
    again = truncated_log_probs(wide[0], wide[1], targets, bias=wide[2], truncation=Truncation())
    plain = truncated_log_probs(hidden, weight, targets, bias=bias)
    for one, two in zip(
        torch.autograd.grad(plain.log_probs.sum(), (hidden, weight, bias)),
        torch.autograd.grad(again.log_probs.sum(), wide),
        strict=True,
    ):
        torch.testing.assert_close(one.float(), two, rtol=0.05, atol=0.05)


def test_autocast_projects_in_its_dtype() -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        cast = truncated_log_probs(hidden, weight, targets, bias=bias)
    halves = (value.detach().bfloat16() for value in (hidden, weight, bias))
    hidden16, weight16, bias16 = halves
    same = truncated_log_probs(hidden16, weight16, targets, bias=bias16)
    for one, two in zip(cast, same, strict=True):  # only the projection is rounded, no later sum
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)
    cast.log_probs.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32


def test_an_empty_batch_keeps_its_place_in_the_graph() -> None:
    hidden, weight, bias, targets = inputs()
    out = truncated_log_probs(hidden[:0], weight, targets[:0], bias=bias, truncation=CUTS[4])
    assert out.log_probs.shape == (0,)
    out.log_probs.sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() == 0


class Storages(TorchDispatchMode):
    """The most memory that was alive in storages made inside, and the largest number of elements of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[Any, int]] = {}
        self.peak = self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (
                    torch.multiprocessing.reductions.StorageWeakRef(storage),
                    storage.nbytes(),
                )
                self.largest = max(self.largest, tensor.numel())
        self.alive = {key: item for key, item in self.alive.items() if not item[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


@pytest.mark.parametrize("cut", [CUTS[0], CUTS[1], CUTS[4]], ids=str)
@pytest.mark.parametrize("count", [256, 1024])
def test_memory_is_that_of_a_tile(cut: Truncation, count: int) -> None:
    """At most 28 bytes x tile x V in the forward and 20 in the backward, 8 without a cut, however many tokens."""
    states, vocabulary, tile = 8, 4096, 64
    hidden = torch.randn(count, states, requires_grad=True)
    weight = torch.randn(vocabulary, states, requires_grad=True)
    targets = torch.randint(vocabulary, (count,))
    small = 100 * count + 2 * 4 * states * (count + vocabulary)  # columns, float32 gradients
    with Storages() as forward:
        out = truncated_log_probs(hidden, weight, targets, truncation=cut, tile=tile)
    with Storages() as backward:
        (out.log_probs.sum() + out.entropies.sum()).backward()
    forwards, backwards = (28, 20) if cut else (8, 8)
    assert 7 * tile * vocabulary < forward.peak < forwards * tile * vocabulary + small
    assert 7 * tile * vocabulary < backward.peak < backwards * tile * vocabulary + small
    assert forward.largest == backward.largest == tile * vocabulary


@pytest.mark.parametrize("autocast", [False, True])
def test_a_head_in_16_bits_is_converted_in_blocks_on_a_cpu(autocast: bool) -> None:
    """Not as a whole, which would be 4 bytes x V x H for every tile; and the sum is that in float32."""
    states, vocabulary, tile, count = 256, 9000, 16, 40
    kind = torch.float32 if autocast else torch.bfloat16
    hidden = torch.randn(count, states, dtype=kind, requires_grad=True)
    weight, targets = 0.1 * torch.randn(vocabulary, states, dtype=kind), torch.randint(vocabulary, (count,))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = truncated_log_probs(hidden, weight, targets, tile=tile)
    with Storages() as backward:
        out.log_probs.sum().backward()
    block = 4 * 2048 * (states + tile)
    small = 100 * count + 8 * states * count
    head = 2 * vocabulary * states  # autocast's copy; without it the head itself, of which views are made
    assert backward.peak < 12 * tile * vocabulary + head + block + small < head + 4 * vocabulary * states
    assert hidden.grad is not None
    probs = (hidden.bfloat16() @ weight.bfloat16().T).float().softmax(-1).detach()
    grad = (torch.nn.functional.one_hot(targets, vocabulary) - probs).bfloat16().float()
    torch.testing.assert_close(hidden.grad.float(), grad @ weight.bfloat16().float(), rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("shape", [(3, 5000, 7), (5000, 3, 7), (2048, 2049, 2), (0, 5, 7)])
def test_products_in_blocks(shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    left, right = torch.randn(rows, inner).bfloat16(), torch.randn(inner, columns).bfloat16()
    total = torch.ones(rows, columns)
    _add_product(total, left, right)
    expected = (1.0 + left.double() @ right.double()).float()
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-4)


def test_a_sharded_head_is_gathered_in_the_backward() -> None:
    hidden, weight, _, targets = inputs()
    entered = []

    class Gathered:
        def __init__(self, *tensors: Tensor) -> None:
            self.tensors = tensors

        def __enter__(self) -> None:
            entered.append([tensor is not None for tensor in self.tensors])

        def __exit__(self, *_: object) -> None:
            entered.append("left")

    out = truncated_log_probs(hidden, weight, targets, gather=Gathered)
    assert entered == []
    out.log_probs.sum().backward()
    assert entered == [[True, False], "left"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 3, 5)}, r"^hidden and weight must be \(N, H\) and \(V, H\)"),
        ({"weight": torch.zeros(V, H + 1)}, r"^hidden and weight must be"),
        ({"targets": torch.zeros(N + 1).long()}, r"^targets must be \(13,\) as hidden, but got \(14,\)\.$"),
        ({"kept_ids": KeptIds.of([[1]])}, r"^kept_ids must have 13 positions as hidden, but got 1\.$"),
        ({"temperature": 0.0}, r"^temperature and tile must be positive, but got 0\.0 and 128\.$"),
        ({"tile": 0}, r"^temperature and tile must be positive"),
    ],
)
def test_refusals(change: dict, message: str) -> None:
    hidden, weight, _, targets = inputs(torch.float32, grad=False)
    with pytest.raises(ValueError, match=message):
        truncated_log_probs(**{"hidden": hidden, "weight": weight, "targets": targets, **change})
