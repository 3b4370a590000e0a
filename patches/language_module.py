"""megatron.core.models.common.language_module.language_module: models whose first and last stage may be on any rank.

``LanguageModule.setup_embeddings_and_output_layer``: while upstream builds a model, it makes copies of tied embeddings equal
between the first and the last pipeline rank. A V placement has no copy on the last rank. ``mark_boundary_weights`` only marks the
weights; ``model/boundary.py`` then makes copies equal, on any ranks. Our own models (``model/seeding.py``) override the method;
the patch is for Megatron-LM's scripts, which build GPTModel.
In a loop that has called ``megatron.pipeline.install`` (``loops``) both ends of a V are on one rank: its output layer takes the
weights of its embedding there. ``LanguageModule.__init__``: such a loop completes the configuration of a model before any layer
is built, and by then Megatron Bridge is imported, if it builds the model (``model_bridge``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.pipeline.patches import compat, loops, model_bridge

_PATH = "megatron.core.models.common.language_module.language_module"


def install_loop() -> None:
    compat.wrap(compat.module(_PATH).LanguageModule, "__init__", _configured)
    compat.wrap(compat.module(_PATH).LanguageModule, "setup_embeddings_and_output_layer", _set_up)


def _configured(build: Any, model: Any, config: Any, *rest: Any, **options: Any) -> None:
    if loops.current is not None:
        model_bridge.install()
        loops.current.configure(config)
    build(model, config, *rest, **options)


def _set_up(make_equal: Any, model: Any) -> None:
    if loops.current is None or not loops.current.ties(model, mark_boundary_weights):
        make_equal(model)


def mark_boundary_weights(model: Any) -> None:
    """Mark the weights of the embedding and of the output layer as upstream does, and send nothing.

    Args:
        model: a ``LanguageModule``, one chunk.
    """
    boundary = [model.embedding.word_embeddings.weight] if model.pre_process else []
    if model.post_process and model.output_layer.weight is not None:
        boundary.append(model.output_layer.weight)
    for weight in boundary:
        weight.is_embedding_or_output_parameter = True
    if not model.share_embeddings_and_output_weights and not model.config.mtp_num_layers:
        return
    tied = model.shared_embedding_or_output_weight()
    if tied is None:  # neither the first nor the last stage
        return
    if model.pre_process and model.post_process:
        tied.zero_out_wgrad = True
        return
    tied.shared_embedding = True
    if not model.pre_process:
        tied.data.fill_(0)
        tied.shared = True


@contextmanager
def boundary_weights_marked() -> Iterator[None]:
    """While this context is open, models are built with ``mark_boundary_weights`` in place of upstream's method."""
    module = compat.module(_PATH)
    original = module.LanguageModule.setup_embeddings_and_output_layer
    module.LanguageModule.setup_embeddings_and_output_layer = mark_boundary_weights
    try:
        yield
    finally:
        module.LanguageModule.setup_embeddings_and_output_layer = original
