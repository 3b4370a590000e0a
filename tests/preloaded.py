"""What the processes of ``pool.forked`` have from their first moment on: the planner, its compiled search, and the flags.

Nothing here touches what patches replace: every process patches megatron-core itself, before it imports what relies on that.
"""

from megatron.pipeline.flags import arguments, validation  # noqa: F401
from megatron.pipeline.planning import plan

plan("v-half", 2, 2)
