"""megatron.bridge.models.conversion.model_bridge, of Megatron Bridge, once a loop that uses it builds a model.

``MegatronModelBridge._broadcast_shared_embeddings``: behind a load of weights upstream sends the embedding of the first pipeline
rank to the output layer of the last rank that is tied to it. A V has both on one rank.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron.pipeline.patches import compat, loops

_PATH, _NAME = "megatron.bridge.models.conversion.model_bridge", "_broadcast_shared_embeddings"


def install() -> None:
    bridge = getattr(sys.modules.get(_PATH), "MegatronModelBridge", None)
    if hasattr(bridge, _NAME):
        compat.wrap(bridge, _NAME, _loaded)


def _loaded(send: Any, bridge: Any, model: Any) -> None:
    if loops.current is None or not loops.current.follow_embedding(model if isinstance(model, list) else [model]):
        send(bridge, model)
