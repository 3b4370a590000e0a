"""Replicas that save together write every weight once, also where a rank has two copies of one, as on a V."""

from __future__ import annotations

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from pool import Pool

COPIES = 2


def written(copies: int) -> list[str]:
    """Which copies of a weight this of all replicas writes."""
    replica = torch.distributed.get_rank()
    state = {
        f"copy {copy}": ShardedTensor.from_rank_offsets("embedding", torch.zeros(4, 2), replica_id=(copy, 0, replica))
        for copy in range(copies)
    }
    state["other"] = ShardedTensor.from_rank_offsets("other", torch.zeros(2), replica_id=(0, 0, replica))
    FullyParallelSaveStrategyWrapper(
        get_default_save_sharded_strategy(), torch.distributed.group.WORLD
    ).apply_saving_parallelization(state)
    return [name for name, one in state.items() if is_main_replica(one.replica_id)]


def test_one_rank_writes_one_of_its_copies(pool: Pool) -> None:
    found = pool.run(2, written, COPIES)
    assert sorted(name for names in found for name in names) == ["copy 0", "other"]
