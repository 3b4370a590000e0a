"""Models of Megatron Bridge, or of any object that builds chunks as its providers do, on a V.

    torchrun --nproc-per-node 2 examples/megatron_bridge.py zb-v Qwen/Qwen3-0.6B      # with random weights

With one chunk per rank nothing of this is needed: ``install("zb-h1")`` before Megatron Bridge builds the model, which ``make
frameworks`` runs. ``GPTModelProvider`` of Megatron Bridge is the TransformerConfig of its models, and its ``provide(pre_process,
post_process, vp_stage)`` builds a chunk. Its ``provide_distributed_model`` would place chunks as megatron-core's interleaved
schedule does. This program was not run with Megatron Bridge itself.
"""

import sys
from typing import Any, Protocol

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from own_training_loop import place, plan, run, wrap
from random_tokens import batches, start

from megatron.pipeline.runtime.pipeline import Pipeline


class Provider(Protocol):
    """What is needed of a provider, which is a TransformerConfig, too."""

    def provide(self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None) -> Any:
        """Build a chunk."""


def build(pipeline: Pipeline, provider: Provider) -> list[Any]:
    """This rank's chunks in DDP.

    Raises:
        ValueError: the provider has put an embedding or an output layer where the placement has none.
    """
    models = []
    for chunk in place(pipeline, provider):
        model = provider.provide(**chunk)
        if (model.pre_process, model.post_process) != (chunk["pre_process"], chunk["post_process"]):
            raise ValueError(
                f"provide({chunk}) has taken the ends of the model from megatron-core's process groups, which know no V: take a "
                "schedule with one chunk per rank, or interleaved, or have provide go by its arguments"
            )
        models.append(model)
    return wrap(pipeline, models)


def main(schedule: str, model: str = "Qwen/Qwen3-0.6B") -> None:
    """Train a model that Megatron Bridge knows on one batch.

    Raises:
        SystemExit: Megatron Bridge is not installed.
    """
    try:
        from megatron.bridge import AutoBridge  # type: ignore[import-untyped]
    except ImportError:
        print("megatron_bridge.py needs Megatron Bridge: pip install megatron-bridge", file=sys.stderr)
        sys.exit(2)
    start()
    pipeline = plan(schedule)
    chunks = build(pipeline, AutoBridge.from_hf_pretrained(model).to_megatron_provider(load_weights=False))
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), chunks)
    for _ in range(5):
        losses, _ = run(chunks, batches(4, seed=0), optimizer)
        if losses:  # on the rank that has the last stage
            print(f"loss {torch.stack(losses).mean():.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
