"""The seed of each rank's engine."""

from types import SimpleNamespace

import pytest

from trl_offpolicy.engines.seeds import seed_of_rank
from trl_offpolicy.trl.engine import TRLEngine


@pytest.mark.parametrize(("size", "seeds"), [(1, [5, 6, 7, 8]), (2, [5, 5, 6, 6]), (4, [5, 5, 5, 5])])
def test_ranks_of_one_engine_share_a_seed_and_others_do_not(size, seeds):
    assert [seed_of_rank(5, rank, tensor_parallel_size=size) for rank in range(4)] == seeds


@pytest.mark.parametrize("seed", [-1, 1.0, True, "0", None])
def test_what_is_no_seed_is_refused(seed):
    with pytest.raises(ValueError, match=r"engine\.seed must be a whole number of at least 0, but got"):
        seed_of_rank(seed, 0)


@pytest.mark.parametrize(("arguments", "expected"), [({}, 43), ({"seed": 3}, 4)])
def test_the_trl_trainers_engine_draws_by_the_runs_seed(arguments, expected):
    engine = object.__new__(TRLEngine)
    engine.settings, engine._run_seed = SimpleNamespace(arguments=arguments), 42
    engine.accelerator, engine.tensor_parallel_size = SimpleNamespace(process_index=1), 1
    assert engine._seed() == {"seed": expected}
