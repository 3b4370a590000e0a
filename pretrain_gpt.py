"""Train a GPT under a pipeline schedule: ``torchrun --nproc-per-node 4 pretrain_gpt.py --config FILE ...``.

``--help`` lists the flags, ``docs/training.md`` explains them.
"""

import logging
import sys
import warnings

# Checkpoint writers are processes that may import this file again: only the one that was started trains.
if __name__ == "__main__":
    # Upstream warns of every optional package that is not there, and introduces its rerun machine, on every rank.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    # So it does where torch has renamed what it calls: two lines a rank for every function.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)

    from megatron.pipeline import patches
    from megatron.pipeline.distributed.processes import leave, let_rank_0_speak

    try:
        patches.install()
    except RuntimeError as error:  # of another release of megatron-core
        let_rank_0_speak()
        sys.exit(f"pretrain_gpt.py: {error}")

    from megatron.pipeline.trainer.program import main

    leave(main(sys.argv[1:]))
