"""Models of Megatron Bridge, or of any object that builds chunks as its providers do. Not tested against Megatron Bridge itself.

    provider = AutoBridge.from_hf_pretrained("...").to_megatron_provider()
    chunks = build(plan("zb-v"), provider)

``GPTModelProvider`` of Megatron Bridge is the TransformerConfig of its models, and its ``provide(pre_process, post_process,
vp_stage)`` builds a chunk. Its ``provide_distributed_model`` would place chunks as megatron-core's interleaved schedule does.
"""

from typing import Any, Protocol

from own_training_loop import place, wrap

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
