"""A training that could be started on a cluster: its flags, its layout and its schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.planner import STOCK, Beside, Device, Objective, Placement, Variant, families

SIZES = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "dp": "data_parallel_size",
}


@dataclass(frozen=True)
class Cluster:
    """A cluster of identical nodes.

    Attributes:
        per_node: GPUs that NVLink or its like connects.
    """

    device: Device
    gpus: int
    per_node: int

    @property
    def per_host(self) -> int:
        """GPUs of a host, on which one launcher starts ranks: of a rack, equal parts of what it has of each."""
        most = self.device.per_host if self.device.per_host < self.device.per_node else self.per_node
        return max(size for size in range(1, min(most, self.per_node) + 1) if self.per_node % size == 0)


@dataclass(frozen=True)
class Candidate:
    """A training that could be started.

    Attributes:
        args: its flags, validated, with ``padded_vocab_size``.
        changes: those that a search has given it, by name.
        variant: the family of its schedule.
        layers: of every stage, in the model's order.
        beside: what ranks need beside activations, in bytes, as training plans with it; None where that is not known.
    """

    args: Settings
    changes: Mapping[str, Any]
    variant: Variant
    layers: tuple[int, ...]
    beside: Beside | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Its layout: ranks of each kind of parallelism by ``SIZES``."""
        return {name: getattr(self.args, flag) for name, flag in SIZES.items()}

    @property
    def is_stock(self) -> bool:
        """Tell whether megatron-core's own function runs it."""
        return bool(self.args.pipeline.schedule == STOCK)

    @property
    def placement(self) -> Placement:
        return families.placement(self.variant.name, self.args.pipeline_model_parallel_size, self.variant.chunks)

    @property
    def microbatches(self) -> int:
        return int(self.args.global_batch_size // (self.args.micro_batch_size * self.args.data_parallel_size))

    @property
    def overlaps(self) -> bool:
        """Tell whether experts' all-to-alls run behind the computation of another microbatch."""
        return bool(self.args.overlap_moe_expert_parallel_comm)

    @property
    def objective(self) -> Objective:
        """Objective of the plan: see docs/post_validation.md."""
        return Objective.SPAN if self.args.steps.ahead else Objective.MAKESPAN

    @property
    def tokens(self) -> int:
        return int(self.args.global_batch_size * self.args.seq_length)
