"""Flags of the earlier forks of Megatron-LM, and what to give instead; ``docs/moving.md`` has their values one by one.

The forks are sail-sg/zero-bubble-pipeline-parallelism (with PipeOffload) and sail-sg/VocabularyParallelism.
"""

from __future__ import annotations

from collections.abc import Iterable

_PROFILE = "--pipeline-costs profile"
_METRICS = "not needed: --metrics FILE has every rank's peak, of every iteration"
NOW = {
    "--enable-zero-bubble": "--pipeline-schedule zb-auto, or zb-v with --zero-bubble-v-schedule",
    "--zero-bubble-v-schedule": "--pipeline-schedule zb-v",
    "--zero-bubble-v-schedule-mem-setup": "--pipeline-schedule zb-v (zb), v-half (half) or v-min (min)",
    "--zero-bubble-max-pending-backward": "--pipeline-schedule zb-h1 (p), zb-h2 (2p) or zb-auto --pipeline-memory-limit X",
    "--enable-1f1b-v": "--pipeline-schedule 1f1b-v",
    "--num-seq-splits": "--pipeline-schedule seq-1f1b (2), or with mpipe plan --splits a file (any other number)",
    "--interleave-group-size": "--pipeline-schedule gis --microbatch-group-size-per-virtual-pipeline-stage N",
    "--enable-zb-runtime": "not needed: one runtime runs all schedules, such as --pipeline-schedule 1f1b",
    "--zero-bubble-pipeline-timers-start-iter": _PROFILE,
    "--zero-bubble-pipeline-timers-end-iter": _PROFILE,
    "--schedule-timer-start": _PROFILE,
    "--schedule-timer-end": _PROFILE,
    "--enable-vocab-parallel": "--vocab-parallel 2",
    "--disable-backward-fusion": "--vocab-parallel 1",
    "--use-interlaced-schedule": "--vocab-parallel interlaced",
    "--enable-layer-redistribution": "--layer-redistribution",
    "--final-stage-num-layers": "--decoder-last-pipeline-num-layers N",
    "--enable-optimizer-post-validation": "--post-validation",
    "--enable-exactly-numeric-match": "not needed: --post-validation ends with the bits that synchronous steps give",
    "--cpu-offload": "--offload full (or selective)",
    "--offload-chunk-num": "--offload selective (at most half of the chunks) or full",
    "--offload-time": "--offload-profile, which measures copies",
    "--auto-offload-time": "--offload-profile, which measures copies",
    "--offload-overlap-sr": "not needed: copies to host memory and back have a stream each",
    "--offload-continuous-buffers": "not needed: host memory is allocated in large pieces and reused",
    "--no-paired-barrier": "not needed: ranks do not wait for each other's copies",
    "--recompute-lgd": "--recompute-granularity selective --recompute-modules layernorm (GELU and dropout: mlp)",
    "--zero-bubble-adaptive-memory-limit-percentile": "--pipeline-memory-limit 60GiB --pipeline-costs profile",
    "--allow-padding-num-layers": "not needed: any number of layers is spread over the ranks",
    "--no-pre-communication-optimization": "not needed: there is no such extra message",
    "--measure-activation-memory": _METRICS,
    "--profile-memory-iter": _METRICS,
}


def refuse(flags: Iterable[str]) -> None:
    """Refuse a command line or the keys of a file that have flags of the forks.

    Raises:
        ValueError: names each of them, with what to give instead.
    """
    found = [flag for flag in dict.fromkeys(flag.partition("=")[0] for flag in flags) if flag in NOW]
    if found:
        raise ValueError(f"flags of an earlier fork (docs/moving.md): {'; '.join(f'{flag}: {NOW[flag]}' for flag in found)}")
