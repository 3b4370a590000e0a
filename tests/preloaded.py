"""What the processes of ``pool.forked`` have from their first moment on: all that a launch and a training import but patches.

Nothing here touches what patches replace: every process patches megatron-core itself, also in the modules that are loaded.
"""

import megatron.core.datasets.gpt_dataset
import megatron.core.models.gpt.gpt_layer_specs

import megatron.pipeline.cli.launch
import megatron.pipeline.launch.run
import megatron.pipeline.trainer.program  # noqa: F401
from megatron.pipeline.planner.planning import plan

plan("v-half", 2, 2)
