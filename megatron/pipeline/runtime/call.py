"""One call of a ``forward_backward_func``: megatron-core's keywords, and what follows from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from megatron.pipeline.patches import compat
from torch.utils._pytree import tree_map_only

from megatron.pipeline.distributed.device import this_device
from megatron.pipeline.planner import Facts, Schedule, counted, kinds, topics

# Groups of a pipeline in which several models send each other dicts of tensors.
_SEVERAL_MODULES = compat.optional("megatron.core.process_groups_config", "MultiModuleProcessGroupCollection")
_GROUPS = ("tp", "cp", "embd", "pos_embd", "pp", "dp_cp")


class LossReports(list[Any]):
    """Words of the loss function about every microbatch. Tensors lose their graphs: they would keep what no backward frees."""

    def append(self, report: Any) -> None:
        super().append(tree_map_only(torch.Tensor, torch.Tensor.detach, report))


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """The keywords of megatron-core's schedules, under their names and with their meaning.

    Attributes:
        chunks: of this rank's model.
        iterators: of the data, one for each chunk.
        config: of the model.

    Raises:
        ValueError: ``p2p_communicator`` or ``pg_collection`` is given without the other, or lacks a group, or is for several
            modules.
    """

    forward_step_func: Callable[..., Any]
    data_iterator: Iterator[Any] | list[Iterator[Any]] | None
    model: torch.nn.Module | list[torch.nn.Module]
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None
    p2p_communicator: P2PCommunicator | None = None
    pg_collection: ProcessGroupCollection | None = None
    force_all_reduce: bool | None = False

    @cached_property
    def chunks(self) -> list[torch.nn.Module]:
        return self.model if isinstance(self.model, list) else [self.model]

    @cached_property
    def iterators(self) -> list[Any]:
        return self.data_iterator if isinstance(self.data_iterator, list) else [self.data_iterator] * len(self.chunks)

    @cached_property
    def config(self) -> Any:
        return get_model_config(self.chunks[0])

    @cached_property
    def device(self) -> torch.device:
        """Device of this rank; its chunks may all be without parameters."""
        return next((parameter.device for chunk in self.chunks for parameter in chunk.parameters()), this_device())

    @cached_property
    def pipeline(self) -> torch.distributed.ProcessGroup:
        """The pipeline's ranks."""
        groups = self.groups
        group: torch.distributed.ProcessGroup = self.p2p_communicator.pp_group if self.p2p_communicator else groups.pp
        return group

    @cached_property
    def groups(self) -> ProcessGroupCollection:
        """As given, or from parallel_state as in megatron-core's schedules."""
        if (self.p2p_communicator is None) != (self.pg_collection is None):
            raise ValueError("give both p2p_communicator and pg_collection, or neither")
        if _SEVERAL_MODULES is not None and isinstance(self.pg_collection, _SEVERAL_MODULES):
            raise ValueError(
                "schedules that are data have no order for several modules in one pipeline, such as an encoder and a decoder on "
                "grids of their own: use --pipeline-schedule stock"
            )
        if self.pg_collection is not None:
            missing = [name for name in _GROUPS if not hasattr(self.pg_collection, name)]
            if missing:
                raise ValueError(f"pg_collection lacks {', '.join(missing)}; set a group you do not need to None")
            return self.pg_collection
        return ProcessGroupCollection.use_mpu_process_groups([*_GROUPS, "dp", "tp_dp_cp"])

    def shapes(self, splits: int) -> dict[kinds.Flow, list[Any]]:
        """Shapes of the tensors of a message, for microbatches in that many slices; a gradient has the shapes of the activation
        that this rank sent."""
        received = schedules.get_tensor_shapes(
            seq_length=self.seq_length // splits,
            micro_batch_size=self.micro_batch_size,
            decoder_seq_length=self.decoder_seq_length and self.decoder_seq_length // splits,
            config=self.config,
            tp_group=self.groups.tp,
            cp_group=self.groups.cp,
        )
        sent = list(received)
        if self.adjust_tensor_shapes_fn is not None:
            received, sent = self.adjust_tensor_shapes_fn(received, sent)
        return {kinds.Flow.ACTIVATION: received, kinds.Flow.GRADIENT: sent}

    def check(self, schedule: Schedule, ahead: bool = False) -> None:
        """Refuse what a schedule that is data cannot do, or what does not fit this one.

        Args:
            ahead: the iteration begins before the step in front of it is known to stand.

        Raises:
            ValueError: says what to change.
        """
        placement, ranks, chunks = schedule.placement, self.pipeline.size(), len(self.chunks)
        if (placement.ranks, schedule.microbatches) != (ranks, self.num_microbatches):
            raise ValueError(
                f"schedule {schedule.name} is for {placement.ranks} ranks and {schedule.microbatches} microbatches, but the "
                f"pipeline group has {ranks} ranks and the iteration {self.num_microbatches} microbatches: plan one for these"
            )
        if placement.chunks != chunks:
            raise ValueError(
                f"schedule {schedule.name} has {counted(placement.chunks, 'chunk')} per rank, but the model has {chunks}: "
                "build the model for the schedule's placement"
            )
        plans = self.config.overlap_moe_expert_parallel_comm and not self.forward_only
        if plans:
            self._check_layer_plans()
        facts = Facts.of_config(
            self.config,
            adjust_tensor_shapes_fn=self.adjust_tensor_shapes_fn is not None,
            chunks=chunks,
            collect_non_loss_data=self.collect_non_loss_data,
            copies=schedule.has_copies,
            overlap_moe_expert_parallel_comm=plans,
            pipeline_schedule=schedule.name,
            post_validation=ahead,
            reruns=schedule.reruns,
            splits=schedule.splits,
            vocab_parallel=schedule.vocabulary,
        )
        facts.refuse(topics.EXCLUDED, topics.SCHEDULES, topics.CALLS, topics.SLICES)

    def _check_layer_plans(self) -> None:
        parameters = inspect.signature(self.forward_step_func).parameters.values()
        if not any(one.name == "return_schedule_plan" or one.kind is one.VAR_KEYWORD for one in parameters):
            raise ValueError(
                "overlap_moe_expert_parallel_comm asks forward_step_func for a plan of the layers: have it take "
                "return_schedule_plan, and then return model.build_schedule_plan(..) in place of model(..)"
            )
