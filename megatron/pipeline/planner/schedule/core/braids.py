"""The seconds of a braid: a forward and a backward whose layers take turns on two lanes, computation and communication.

Layers of experts compute attention, dispatch their tokens to the ranks that have the experts, compute these, and combine the
results; a backward does the reverse. The order of these parts is that of megatron-core's layer plans
(``TransformerLayerSchedulePlan`` in megatron/core/models/common/model_chunk_schedule_plan.py): a lane runs its parts in the order
in which the host launches them, and a part of a half waits for the part before it.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
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


@lru_cache(4096)
def braid_seconds(forward: Parts, backward: Parts, beside_communication: float = 1.0) -> tuple[float, float]:
    """When a braid's forward is over, and when all of the braid is, from its start.

    The first layer of the forward goes with the last of the backward, and so on; what one half has more layers follows alone. A
    backward that computes its weights' gradients does so behind those of experts and of attention, which are sent on meanwhile.

    Args:
        beside_communication: how many times as long computation takes while the other lane communicates.
    """
    # By lane, in the order of their launch: their half, how many parts of it are over before them, and their seconds.
    lanes: dict[str, deque[tuple[str, int, float]]] = {"compute": deque(), "communicate": deque()}
    launched = {"forward": 0, "backward": 0, "weights": 0}

    def run(half: str, lane: str, seconds: float) -> None:
        lanes[lane].append((half, launched[half], seconds))
        launched[half] += half != "weights"  # which wait for nothing but their lane

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
            run("weights", "compute", theirs.expert_weights)
            run("backward", "communicate", theirs.dispatch)
        if runs_forward:
            run("forward", "compute", ours.experts)
            run("forward", "communicate", ours.combine)
        if runs_backward:
            run("backward", "compute", theirs.attention)
            run("weights", "compute", theirs.attention_weights)
    return _replayed(lanes, beside_communication)


def _replayed(lanes: dict[str, deque[tuple[str, int, float]]], slower: float) -> tuple[float, float]:
    """When the forward's parts are over, and when all are."""
    over, ready = {"forward": 0, "backward": 0, "weights": 0}, {"forward": 0.0, "backward": 0.0, "weights": 0.0}
    running: dict[str, tuple[float, str]] = {}  # by lane: when its part is over, and its half
    now = 0.0
    while running or any(lanes.values()):
        for lane, parts in lanes.items():
            if lane not in running and parts and over[parts[0][0]] >= parts[0][1]:
                half, _, seconds = parts.popleft()
                running[lane] = now + seconds, half
                if len(running) == 2:  # from now on what remains of the computation takes longer
                    end, computed = running["compute"]
                    running["compute"] = end + (slower - 1) * (end - now), computed
        lane = min(running, key=running.__getitem__)
        now, half = running.pop(lane)
        over[half] += half != "weights"
        ready[half] = now
        if lane == "communicate" and "compute" in running:
            end, computed = running["compute"]
            running["compute"] = end - (1 - 1 / slower) * (end - now), computed
    return ready["forward"], now
