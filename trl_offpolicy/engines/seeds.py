"""Seeds of the engines: ranks must draw independently, and the ranks that share one engine must draw alike."""

from __future__ import annotations

from trl_offpolicy.checks import check_whole


def seed_of_rank(seed: int, rank: int, *, tensor_parallel_size: int = 1) -> int:
    """The seed of the engine that a rank takes part in.

    With one seed on all ranks, copies of a prompt on two ranks would get the same completion, and a group would hold
    half as many samples as it seems to.

    Args:
        seed: the seed of the run's engines.
        rank: number of this process.
        tensor_parallel_size: consecutive ranks that are one engine together. They must sample the same tokens.

    Returns:
        ``seed + rank // tensor_parallel_size``, as TRL counts.

    Raises:
        ValueError: ``seed`` is no whole number from 0 on.

    Example:
        >>> [seed_of_rank(7, rank, tensor_parallel_size=2) for rank in range(4)]
        [7, 7, 8, 8]
    """
    check_whole("engine.seed", seed, least=0)
    return seed + rank // tensor_parallel_size
