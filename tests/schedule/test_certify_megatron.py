"""The order and the messages of megatron-core's interleaved schedule: its own function runs here, one rank after another, with
process groups and messages that record. ``mpipe certify interleaved`` has what it does; ``test_cli_certify.py`` has which of the
hangs that are reported of it are there."""

from __future__ import annotations

import itertools
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import ModelParallelConfig
from megatron.core.pipeline_parallel import p2p_communication, schedules
from releases import CORE

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule.certify.certificate import certify
from megatron.pipeline.planner.schedule.certify.megatron import megatron_interleaved
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.kinds import Flow
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.placement import interleaved
from megatron.pipeline.planner.schedule.lower.program import Compute, Message, Receive, Send, Wait
from megatron.pipeline.planner.schedule.lower.traffic import Row, Start, Sync, Traffic

pytestmark = pytest.mark.skipif(CORE != (0, 16), reason="the rows are those of megatron-core 0.16")


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
        def isend(tensor: torch.Tensor, dst: int, group: Any) -> Any:
            return self._post([(True, tensor, dst)])

        distributed = Instead(
            torch.distributed,
            isend=isend,
            irecv=lambda tensor, src=None, group=None: self._post([(False, tensor, src)]),
            P2POp=lambda op, tensor, peer, group: (op is isend, tensor, peer),
            batch_isend_irecv=lambda posts: [self._post(posts)],
            get_backend=lambda group: "nccl",
            group=SimpleNamespace(WORLD=None),
        )

        def zeros(*size: Any, device: str, **more: Any) -> torch.Tensor:
            return torch.zeros(*size, **more)

        cuda = Instead(torch.cuda, current_device=lambda: "cpu", synchronize=lambda: self.steps.append(Sync()))
        on_cpu = Instead(torch, distributed=distributed, cuda=cuda, zeros=zeros)
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
        microbatch, stage = int(named["current_microbatch"]), self._stage(model.chunk)
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

    def row(self) -> Row:
        """Steps with the names of messages; the shape of a tensor, in a group before it, has the name of that."""
        names, groups = dict(self.names), [step for step in self.steps if isinstance(step, list)]
        for number, shapes in enumerate(groups):
            if shapes[0][1].dtype == torch.int64:
                tensors = [*itertools.chain.from_iterable(groups[number + 1 :])][: len(shapes)]
                of_kinds = (sorted(posts, key=itemgetter(0)) for posts in (shapes, tensors))  # with overlap in another order
                for (_, shape, _), (_, tensor, _) in zip(*of_kinds, strict=True):
                    name = self.names[id(tensor)]
                    names[id(shape)] = name._replace(flow=f"shape of the {name.flow}")
        row: list[Any] = []
        for step in self.steps:
            if isinstance(step, list):
                row += [(Send if sends else Receive)(names[id(tensor)], peer) for sends, tensor, peer in step]
                row.append(Start())
            elif isinstance(step, torch.Tensor):
                row.append(Wait(names[id(step)]))
            else:
                row.append(Compute(step) if isinstance(step, Pass) else step)
        return tuple(row)


def recorded(ranks: int, microbatches: int, chunks: int, group: int = 0, overlap: bool = True, shapes: bool = False) -> Traffic:
    """The traffic of megatron-core's function.

    Args:
        group: microbatches that run through a chunk before the next one does; 0 for one of each rank.
        overlap, shapes: ``--overlap-p2p-communication``, ``--variable-seq-lengths``.
    """
    rows = []
    for rank in range(ranks):
        with pytest.MonkeyPatch.context() as patched:
            rows.append(Recorder(patched, rank, (ranks, microbatches, chunks, group or ranks), overlap, shapes).row())
    return Traffic("recorded", interleaved(ranks, chunks), microbatches, tuple(rows))


# A group of more than one per rank, a last group that is smaller, all forwards in warm-up.
@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks", "group"),
    [(2, 4, 2, 2), (3, 6, 2, 3), (4, 8, 3, 4), (4, 4, 2, 4), (4, 10, 2, 5), (4, 9, 2, 5), (3, 5, 2, 5)],
)
def test_its_order_is_that_of_our_interleaved(ranks: int, microbatches: int, chunks: int, group: int) -> None:
    ours = planning.plan("interleaved", ranks, microbatches, chunks=chunks, group=group).passes
    for overlap in (True, False):
        rows = recorded(ranks, microbatches, chunks, group, overlap).rows
        assert ours == tuple(tuple(step.work for step in row if isinstance(step, Compute)) for row in rows)


def order(row: Row) -> list[object]:
    """Steps without those that change nothing: a wait for what has been waited for, and a start directly before a wait."""
    steps = [step for at, step in enumerate(row) if not (isinstance(step, Wait) and step in row[:at])]
    return [
        step for step, after in zip(steps, [*steps[1:], None], strict=True) if not (step == Start() and isinstance(after, Wait))
    ]


@pytest.mark.parametrize("shapes", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(2, 2, 2), (2, 4, 2), (3, 3, 3), (3, 6, 2), (4, 4, 2), (4, 12, 3)])
def test_certify_has_its_messages(ranks: int, microbatches: int, chunks: int, overlap: bool, shapes: bool) -> None:
    core = recorded(ranks, microbatches, chunks, overlap=overlap, shapes=shapes)
    ours = megatron_interleaved(planning.plan("interleaved", ranks, microbatches, chunks=chunks), overlap, shapes)
    assert list(map(order, ours.rows)) == list(map(order, core.rows))


@pytest.mark.parametrize(("ranks", "chunks"), [*((ranks, 2) for ranks in range(2, 9)), (2, 3), (3, 4), (4, 3)])
def test_overlapped_messages_hang_over_no_transport(ranks: int, chunks: int) -> None:
    for microbatches, group in ((ranks, ranks), (ranks + 1, ranks + 1), (2 * ranks, ranks)):
        traffic = recorded(ranks, microbatches, chunks, group)
        for cold in (False, True):
            certificate = certify(traffic, uniform(traffic.placement), cold=cold)
            assert not certificate.hangs
            assert certificate.unlimited == min(outcome.makespan or 0 for outcome in certificate.outcomes)
