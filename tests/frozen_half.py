"""The script of Megatron-LM that FROZEN names, with the first half of its model's layers and what comes before them frozen.

megatron-core's configuration of a model takes hooks, from 0.19 on, that see its chunks before DDP does. Of tied ends
both are frozen.
"""

import os
import runpy
from typing import Any

from megatron.training import argument_utils

_configured = argument_utils.gpt_config_from_args


def freeze(chunks: list[Any]) -> list[Any]:
    for chunk in chunks:
        if chunk.pre_process:
            chunk.embedding.requires_grad_(False)
        if chunk.post_process and chunk.share_embeddings_and_output_weights:
            chunk.shared_embedding_or_output_weight().requires_grad_(False)
        for layer in chunk.decoder.layers:
            layer.requires_grad_(layer.layer_number > chunk.config.num_layers // 2)
    return chunks


def configured(*given: Any, **options: Any) -> Any:
    found = _configured(*given, **options)
    found.pre_wrap_hooks.append(freeze)
    return found


if __name__ == "__main__":
    argument_utils.gpt_config_from_args = configured
    runpy.run_path(os.environ["FROZEN"], run_name="__main__")
