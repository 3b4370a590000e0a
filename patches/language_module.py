"""megatron.core.models.common.language_module.language_module: models whose ends may be on any rank.

``LanguageModule.setup_embeddings_and_output_layer``: while a model is built, upstream makes copies of tied embeddings equal
between the first and the last pipeline rank, where a V has none. Here they are marked only; ``model/boundary.py`` then makes them
equal, wherever they are. Our own models (``model/seeding.py``) need no patch for that; Megatron-LM's scripts build GPTModel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.pipeline.patches import upstream


@contextmanager
def ends_marked() -> Iterator[None]:
    """Models that are built within have their ends marked, and nothing is sent.

    Raises:
        RuntimeError: one of upstream's symbols is unknown.
    """
    from megatron.pipeline.model.boundary import mark_ends

    module = upstream.require(
        "megatron.core.models.common.language_module.language_module",
        ("LanguageModule.setup_embeddings_and_output_layer", "LanguageModule.shared_embedding_or_output_weight"),
    )
    original = module.LanguageModule.setup_embeddings_and_output_layer
    module.LanguageModule.setup_embeddings_and_output_layer = mark_ends
    try:
        yield
    finally:
        module.LanguageModule.setup_embeddings_and_output_layer = original
