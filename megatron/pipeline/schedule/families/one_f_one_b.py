"""1F1B: fill the pipeline with forwards, then alternate one forward and one (fused) backward.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush). With equal stages the span is

    m(F+B+W) + (p-1)(F+B+W) + hop*(2m(p-1)/p + 2(p-2))

where p > 1 and m is a multiple of p, and for every m without hops. Rank r holds min(m, p-r) microbatches.
"""

from __future__ import annotations

from megatron.pipeline.schedule.core.placement import interleaved
from megatron.pipeline.schedule.families import seq_1f1b
from megatron.pipeline.schedule.families.family import Family

# Of whole microbatches: rank r runs p-r forwards before its first backward, so that it holds p-r microbatches from then on.
FAMILY = Family("1f1b", interleaved, seq_1f1b.plan, fused=True, exposed_hops=1.0, suggested=True)
