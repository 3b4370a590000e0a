"""What ``megatron_interleaved`` says that ranks do is what megatron-core's own function does: it runs here, one rank after another,
on processes groups and tensors that record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import ModelParallelConfig
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from megatron.pipeline.schedule.certify.certificate import certify
from megatron.pipeline.schedule.certify.megatron import megatron_interleaved
from megatron.pipeline.schedule.certify.network import ends_of, partners
from megatron.pipeline.schedule.certify.traffic import Await, Batch, Row, Shape, Sync
from megatron.pipeline.schedule.core.costs import uniform
from megatron.pipeline.schedule.core.kinds import Flow
from megatron.pipeline.schedule.core.passes import Kind, Pass
from megatron.pipeline.schedule.families.interleaved import chunk_by_chunk
from megatron.pipeline.schedule.lower.program import Compute, Message

# (ranks, microbatches, chunks, group): a group of more than one per rank, a last group that is smaller, all forwards in warm-up.
SIZES = [(2, 4, 2, 2), (3, 6, 2, 3), (4, 8, 2, 4), (4, 8, 3, 4), (4, 4, 2, 4), (4, 10, 2, 5), (4, 9, 2, 5), (3, 5, 2, 5)]


class Instead:
    """A module with some names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        self.__dict__ |= names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class Recorder:
    """One rank of megatron-core's function. What it receives gets its name from the pass that takes it."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, rank: int, size: tuple[int, int, int, int], overlap: bool, shapes: bool
    ) -> None:
        self.rank, (self.ranks, self.microbatches, self.chunks, self.group) = rank, size
        self.steps: list[Any] = []  # of a post: (sends, tensor, peer); of a wait: tensor
        self.names: dict[int, Any] = {}  # by tensor
        self._kept: list[torch.Tensor] = []  # so that no other gets their id
        self._shapes: list[tuple[bool, Any]] = []
        self._patch(monkeypatch)
        config = ModelParallelConfig(
            pipeline_model_parallel_size=self.ranks,
            virtual_pipeline_model_parallel_size=self.chunks,
            microbatch_group_size_per_vp_stage=self.group,
            pipeline_dtype=torch.float32,
            overlap_p2p_comm=overlap,
            batch_p2p_comm=not overlap,
            variable_seq_lengths=shapes,
        )
        config.hidden_size = 1
        config.num_microbatches_with_partial_activation_checkpoints = None
        config.overlap_moe_expert_parallel_comm = False
        config.fine_grained_activation_offloading = False
        config.mtp_standalone = False
        self._run(config)

    def _run(self, config: Any) -> None:
        group = SimpleNamespace(size=lambda: self.ranks, rank=lambda: self.rank)
        communicator = p2p_communication.P2PCommunicator.__new__(p2p_communication.P2PCommunicator)
        communicator.__dict__ |= {
            "pp_group": group, "config": config, "virtual_pipeline_model_parallel_size": self.chunks,
            "next_rank": (self.rank + 1) % self.ranks, "prev_rank": (self.rank - 1) % self.ranks,
        }  # fmt: skip
        model = [torch.nn.Identity() for _ in range(self.chunks)]
        for chunk, part in enumerate(model):
            part.config, part.model_type, part.chunk = config, None, chunk  # type: ignore[assignment]
        one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        groups = SimpleNamespace(tp=one, cp=one, embd=None, pos_embd=None, pp=group, dp_cp=one)
        schedules.forward_backward_pipelining_with_interleaving(
            forward_step_func=None,
            data_iterator=[iter(()) for _ in model],
            model=model,
            num_microbatches=self.microbatches,
            seq_length=1,
            micro_batch_size=1,
            p2p_communicator=communicator,
            pg_collection=groups,
        )

    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        distributed = Instead(
            torch.distributed,
            isend=lambda tensor, dst=None, group=None: self._post([(True, tensor, dst)]),
            irecv=lambda tensor, src=None, group=None: self._post([(False, tensor, src)]),
            P2POp=lambda op, tensor, peer, group: (op is distributed.isend, tensor, peer),
            batch_isend_irecv=lambda posts: [self._post(posts)],
            get_backend=lambda group: "nccl",
            group=SimpleNamespace(WORLD=None),
        )
        cuda = Instead(torch.cuda, current_device=lambda: "cpu", synchronize=lambda: self.steps.append(Sync()))
        on_cpu = Instead(
            torch, distributed=distributed, cuda=cuda, zeros=lambda *size, device=None, **more: torch.zeros(*size, **more)
        )
        monkeypatch.setattr(p2p_communication, "torch", on_cpu)
        monkeypatch.setattr(schedules, "torch", on_cpu)
        monkeypatch.setattr(schedules, "forward_step", self._forward)
        monkeypatch.setattr(schedules, "backward_step", self._backward)
        monkeypatch.setattr(schedules, "get_model_type", lambda model: None)
        # These ask torch.distributed, which has no process group here.
        monkeypatch.setattr(schedules, "is_pp_first_stage", lambda group: group.rank() == 0)
        monkeypatch.setattr(schedules, "is_pp_last_stage", lambda group: group.rank() == group.size() - 1)

    def _post(self, posts: list[tuple[bool, torch.Tensor, int]]) -> Any:
        self._kept += [tensor for _, tensor, _ in posts]
        for _, tensor, _ in posts:
            if tensor.dtype == torch.int64:
                tensor.fill_(1)
        self.steps.append(posts)
        return SimpleNamespace(wait=lambda: self.steps.extend(tensor for _, tensor, _ in posts))

    def _stage(self, chunk: int) -> int:
        return chunk * self.ranks + self.rank

    def _forward(self, function: Any, data: Any, model: Any, count: int, given: Any, *more: Any, **named: Any) -> Any:
        microbatch, stage = named.get("current_microbatch", more[-1] if more else None), self._stage(model.chunk)
        if given is not None:
            self.names[id(given)] = Message(Flow.ACTIVATION, microbatch, stage - 1)
        self.steps.append(Pass(Kind.F, microbatch, model.chunk))
        output = torch.zeros(1, 1, 1)
        self.names[id(output)] = Message(Flow.ACTIVATION, microbatch, stage)
        self._kept.append(output)
        return output, torch.zeros([], dtype=torch.int)

    def _backward(self, given: Any, output: Any, gradient: Any, *more: Any) -> Any:
        made = self.names[id(output)]
        if gradient is not None:
            self.names[id(gradient)] = Message(Flow.GRADIENT, made.microbatch, made.stage + 1)
        self.steps.append(Pass(Kind.BW, made.microbatch, made.stage // self.ranks))
        result = torch.zeros(1, 1, 1)
        self.names[id(result)] = Message(Flow.GRADIENT, made.microbatch, made.stage)
        self._kept.append(result)
        return result

    def flat(self) -> list[Any]:
        """Steps with names; shapes without theirs, which no pass takes."""

        def name(tensor: torch.Tensor) -> Any:
            return "shape" if tensor.dtype == torch.int64 else self.names[id(tensor)]

        named: list[Any] = []
        for step in self.steps:
            if isinstance(step, list):
                named.append([(sends, name(tensor), peer) for sends, tensor, peer in step])
            else:
                named.append(("wait", name(step)) if isinstance(step, torch.Tensor) else step)
        return named


def flat(row: Row) -> list[Any]:
    def name(item: Any) -> Any:
        return "shape" if isinstance(item, Shape) else item

    told: list[Any] = []
    for step in row:
        match step:
            case Compute(work):
                told.append(work)
            case Batch(posts):
                told.append([(post.sends, name(post.item), post.peer) for post in posts])
            case Await(item):
                told.append(("wait", name(item)))
            case _:
                told.append(step)
    return told


@pytest.mark.parametrize("shapes", [False, True], ids=["fixed", "variable"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "batched"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_what_megatron_core_does(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int, int, int], overlap: bool, shapes: bool
) -> None:
    traffic = megatron_interleaved(*size, overlap=overlap, shapes=shapes)
    for rank in range(size[0]):
        with monkeypatch.context() as patched:
            recorded = Recorder(patched, rank, size, overlap, shapes).flat()
        assert flat(traffic.rows[rank]) == recorded, f"rank {rank}"
