"""The seconds of a braid: a forward and a backward whose layers take turns on two lanes, computation and communication.

Layers of experts compute attention, dispatch their tokens to the ranks that have the experts, compute these, and combine the
results; a backward does the reverse. The order of these parts is that of megatron-core's layer plans
(``TransformerLayerSchedulePlan`` in megatron/core/models/common/model_chunk_schedule_plan.py): a lane runs its parts in the order
in which the host launches them, and a part of a half waits for the part before it.
"""

from __future__ import annotations

from typing import NamedTuple


class Parts(NamedTuple):
    """Seconds of the parts of one pass through all layers of a stage.

    Attributes:
        attention: and all else that is computed before the dispatch; in a backward, its gradient.
        dispatch, combine: all-to-alls.
        experts: computed between them.
        attention_weights, expert_weights: of a backward, the gradients of weights that it computes itself, after the other ones.
        layers: of the stage; the parts of all of them take the same time.
    """

    attention: float
    dispatch: float
    experts: float
    combine: float
    attention_weights: float = 0.0
    expert_weights: float = 0.0
    layers: int = 1

    @property
    def computing(self) -> float:
        """Seconds of what needs the lane of computation."""
        return self.attention + self.experts + self.attention_weights + self.expert_weights

    @property
    def communicating(self) -> float:
        """Seconds of what needs the lane of communication."""
        return self.dispatch + self.combine

    @property
    def of_layer(self) -> Parts:
        attention, dispatch, experts, combine, *weights = (seconds / max(1, self.layers) for seconds in self[:-1])
        return Parts(attention, dispatch, experts, combine, *weights)  # type: ignore[arg-type]  # layers: 1


def braid_seconds(forward: Parts, backward: Parts) -> tuple[float, float]:
    """When a braid's forward is over, and when all of the braid is, from its start.

    The first layer of the forward goes with the last of the backward, and so on; what one half has more layers follows alone. A
    backward that computes its weights' gradients does so behind those of experts and of attention, which are sent on meanwhile.
    """
    ready = {"forward": 0.0, "backward": 0.0}  # when the last part of a half is over
    free = {"compute": 0.0, "communicate": 0.0}  # when the last part on a lane is over

    def run(half: str, lane: str, seconds: float) -> None:
        ready[half] = free[lane] = max(ready[half], free[lane]) + seconds

    ours, theirs = forward.of_layer, backward.of_layer
    for layer in range(max(forward.layers, backward.layers)):
        runs_forward, runs_backward = layer < forward.layers, layer < backward.layers
        if runs_backward:
            run("backward", "communicate", theirs.combine)
        if runs_forward:
            run("forward", "compute", ours.attention)
        if runs_backward:
            run("backward", "compute", theirs.experts)
        if runs_forward:
            run("forward", "communicate", ours.dispatch)
        if runs_backward:
            free["compute"] += theirs.expert_weights
            run("backward", "communicate", theirs.dispatch)
        if runs_forward:
            run("forward", "compute", ours.experts)
            run("forward", "communicate", ours.combine)
        if runs_backward:
            run("backward", "compute", theirs.attention)
            free["compute"] += theirs.attention_weights
    return ready["forward"], max(free.values())
