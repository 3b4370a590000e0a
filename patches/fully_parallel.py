"""megatron.core.dist_checkpointing.strategies.fully_parallel: replicas of a model save a checkpoint together, each a part of it.

``FullyParallelSaveStrategyWrapper.apply_saving_parallelization``: upstream chooses a replica for each weight, which writes every
copy that it has. Of tied embeddings there are two copies: under upstream's placements on different pipeline ranks, on a V on the
same rank. It would write both, and its own check of the checkpoint refuses that. Here a rank writes its first copy alone.
"""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.pipeline.patches import compat

_PATH = "megatron.core.dist_checkpointing.strategies.fully_parallel"
_CHOOSE = "distribute_main_replicas_with_precomputed_distribution"


def install() -> None:
    """Wrap it."""
    compat.wrap(compat.module(_PATH).FullyParallelSaveStrategyWrapper, "apply_saving_parallelization", _written_once)


def _written_once(apply: Any, strategy: Any, state: Any) -> None:
    module: Any = compat.module(_PATH)
    choose = getattr(module, _CHOOSE)

    def chosen(state: Any, *rest: Any) -> None:
        choose(state, *rest)
        seen = set()
        for one in nested_values(state):
            if isinstance(one, ShardedTensor) and is_main_replica(one.replica_id):
                shard = module._sharded_tensor_shard_id(one)
                if shard in seen:
                    one.replica_id = 1
                seen.add(shard)

    setattr(module, _CHOOSE, chosen)
    try:
        apply(strategy, state)
    finally:
        setattr(module, _CHOOSE, choose)
