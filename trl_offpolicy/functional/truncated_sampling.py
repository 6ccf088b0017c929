"""Which tokens top-p, top-k and min-p leave to the sampler: vLLM's rules, or the ids that an engine reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Truncation:
    """Sampling options that cut the distribution; the defaults cut nothing.

    Args:
        top_p: keep the smallest set of most likely tokens whose probabilities reach this; in (0, 1].
        top_k: keep this many of the most likely tokens; 0 = all.
        min_p: keep tokens that are at least this fraction as likely as the most likely one; in [0, 1].
        exact_top_k: of the tokens tied with the k-th keep an arbitrary few, k in all (vLLM's Triton sampler). False:
            keep all of them (vLLM's PyTorch sampler, transformers).

    Raises:
        ValueError: a value is outside its range.
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    exact_top_k: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], but got {self.top_p}.")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k must be a whole number >= 0 (0 = all tokens), but got {self.top_k!r}.")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], but got {self.min_p}.")

    def __bool__(self) -> bool:
        return (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0)


class Support(NamedTuple):
    """The kept tokens of each position: those above ``lowest``, and ``share`` of those equal to it.

    Tokens tied at the edge are equally likely, and vLLM may keep an arbitrary few of them. Only their number matters to
    the normaliser, so each of them counts as ``share``.
    """

    lowest: Tensor
    """(N,) smallest kept logit; ``-inf`` where nothing is cut."""
    share: Tensor
    """(N,) in (0, 1]; 1 where the edge is not tied."""

    def weights(self, logits: Tensor) -> Tensor:
        """(N, V): 1 for tokens above the edge, ``share`` for those tied at it, 0 for the others."""
        lowest, share = self.lowest.unsqueeze(1), self.share.unsqueeze(1).to(logits.dtype)
        return torch.where(logits == lowest, share, (logits > lowest).to(logits.dtype))


def truncated_support(logits: Tensor, truncation: Truncation) -> Support:
    """The tokens that vLLM samples from: min-p first, then top-k, then top-p of what is left, renormalised.

    As in vLLM's samplers: min-p keeps ``p >= min_p * max p``; top-k keeps every token tied with the k-th, or k in all
    (``exact_top_k``); top-p drops, from the least likely up, tokens while their summed probability is ``<= 1 - top_p``,
    never the last.

    Args:
        logits: (N, V) float32 or float64, already divided by the temperature.
        truncation: the options that cut.

    Returns:
        Two numbers per row; no gradient.

    Example:
        >>> logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
        >>> truncated_support(logits, Truncation(top_p=0.7)).weights(logits)
        tensor([[1., 1., 0., 0.]])
        >>> truncated_support(logits, Truncation(min_p=0.2)).weights(logits)
        tensor([[1., 1., 1., 0.]])

    Reference: vLLM 0.31 ``v1/sample/logits_processor/builtin.py`` (min-p), ``v1/sample/ops/topk_topp_sampler.py``
    (``apply_top_k_top_p_pytorch``) and ``topk_topp_triton.py`` beside it (``exact_top_k``).
    """
    if logits.dim() != 2:
        raise ValueError(f"logits must have shape (N, V), but got {tuple(logits.shape)}.")
    logits = logits.detach()
    lowest = torch.full_like(logits[:, 0], -torch.inf)
    share = torch.ones_like(lowest)
    if truncation.min_p > 0.0:
        probs = logits.softmax(dim=-1)
        edge = probs.amax(dim=-1, keepdim=True) * truncation.min_p
        lowest = logits.masked_fill(probs < edge, torch.inf).amin(dim=-1)
    if 0 < truncation.top_k < logits.shape[1]:
        lowest = torch.maximum(lowest, logits.topk(truncation.top_k, dim=-1).values[:, -1])
        if truncation.exact_top_k:
            above, tied = _edge(logits, lowest)
            share = ((truncation.top_k - above) / tied).to(share.dtype).clamp(max=1.0)  # min-p may have left fewer
    if truncation.top_p < 1.0:
        return _top_p_support(logits, lowest, truncation)
    return Support(lowest, share)


def _edge(logits: Tensor, lowest: Tensor) -> tuple[Tensor, Tensor]:
    """Two (N,) counts: the tokens above the edge, and the tokens at it."""
    lowest = lowest.unsqueeze(1)
    return (logits > lowest).sum(dim=-1), (logits == lowest).sum(dim=-1)


def _top_p_support(logits: Tensor, lowest: Tensor, truncation: Truncation) -> Support:
    """Top-p among the tokens that are at least ``lowest``."""
    ascending = logits.masked_fill(logits < lowest.unsqueeze(1), -torch.inf).sort(dim=-1).values
    if truncation.exact_top_k:  # nothing where k is 0 or not below V
        ascending[:, : -truncation.top_k] = -torch.inf
    mass = ascending.softmax(dim=-1)
    mass = torch.cumsum(mass, dim=-1, out=mass)
    one = torch.ones((), dtype=logits.dtype, device=logits.device)
    dropped = one - one * truncation.top_p  # in the dtype of the logits, as vLLM
    kept = (mass[:, :-1] > dropped).sum(dim=-1) + 1  # the most likely token always stays
    lowest = ascending.gather(1, (logits.shape[1] - kept).unsqueeze(1)).squeeze(1)
    above, tied = _edge(logits, lowest)
    return Support(lowest, (kept - above).to(logits.dtype) / tied)


@dataclass(frozen=True, eq=False)
class KeptIds:
    """The tokens that an engine kept at each of N positions: all ids in one row, and how many each position has.

    Both are on the host, so that the positions of a tile are found without a wait for the device.

    Args:
        ids: (M,) int32 token ids, those of the first position first.
        counts: (N,) int32, the number of ids of each position, M in all; 0 = the engine did not say.

    Raises:
        ValueError: the counts do not add up to M.

    Example:
        >>> kept = KeptIds.of([[4, 7], [], [7]])
        >>> kept.counts.tolist(), kept[1:].ids.tolist(), kept.unknown.tolist()
        ([2, 0, 1], [7], [1])
    """

    ids: Tensor
    counts: Tensor

    def __post_init__(self) -> None:
        if self.ids.dim() != 1 or self.counts.dim() != 1 or int(self.counts.sum()) != len(self.ids):
            raise ValueError(
                f"counts must be (N,) and add up to the {tuple(self.ids.shape)} ids, but got shape "
                f"{tuple(self.counts.shape)} and {int(self.counts.sum())}."
            )

    @classmethod
    def of(cls, positions: Sequence[Sequence[int]]) -> KeptIds:
        """From one list of ids for each position."""
        flat = [token for ids in positions for token in ids]
        counts = [len(ids) for ids in positions]
        return cls(torch.tensor(flat, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32))

    @classmethod
    def alone(cls, tokens: Sequence[int]) -> KeptIds:
        """Each position keeps its own token and no other: of what was not sampled."""
        return cls(torch.tensor(list(tokens), dtype=torch.int32), torch.ones(len(tokens), dtype=torch.int32))

    @classmethod
    def unreported(cls, length: int) -> KeptIds:
        """Positions of which the engine did not say what it kept."""
        return cls(torch.zeros(0, dtype=torch.int32), torch.zeros(length, dtype=torch.int32))

    @classmethod
    def joined(cls, parts: Sequence[KeptIds]) -> KeptIds:
        """The positions of all parts, in their order."""
        none = torch.zeros(0, dtype=torch.int32)
        columns = ([none, *(part.ids for part in parts)], [none, *(part.counts for part in parts)])
        return cls(*map(torch.cat, columns))

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, positions: slice) -> KeptIds:
        start, stop, step = positions.indices(len(self))
        if step != 1:
            raise ValueError(f"positions must follow each other, but got a step of {step}.")
        first = int(self.counts[:start].sum())
        counts = self.counts[start:stop]
        return KeptIds(self.ids[first : first + int(counts.sum())], counts)

    def at(self, places: Tensor) -> KeptIds:
        """The positions where ``places``, (N,) bool on the host, is True."""
        return KeptIds(self.ids[torch.repeat_interleave(places, self.counts)], self.counts[places])

    @property
    def unknown(self) -> Tensor:
        """(U,) the positions of which the engine did not say what it kept."""
        return (self.counts == 0).nonzero().squeeze(1)

    def tolist(self) -> list[list[int]]:
        """One list of ids for each position."""
        return [part.tolist() for part in torch.split(self.ids, self.counts.tolist())]


def listed_weights(kept: KeptIds, vocabulary: int, *, device: torch.device | None = None) -> Tensor:
    """(N, V) float32, 1 for the listed tokens: the kept set that an engine reported (vLLM's ``return_sampling_mask``).

    Args:
        kept: the ids of N positions; one that lists none has zeros only.
        vocabulary: V.
        device: where the result is; None = the host.

    Example:
        >>> listed_weights(KeptIds.of([[2, 0], [1]]), 3)
        tensor([[1., 0., 1.],
                [0., 1., 0.]])
    """
    weights = torch.zeros(len(kept), vocabulary, device=device)
    counts = kept.counts.to(weights.device)
    rows = torch.repeat_interleave(torch.arange(len(kept), device=weights.device), counts, output_size=len(kept.ids))
    weights[rows, kept.ids.to(weights.device, torch.long)] = 1.0
    return weights
