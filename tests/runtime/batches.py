"""What tests/runtime/test_every_batch.py runs on the pool: a GPT on microbatches of unequal lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

import tiny_gpt
import torch
from example_runs import example, optimizer_of
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, get_rerun_state_machine
from megatron.core.utils import get_model_config

from megatron.pipeline import install
from megatron.pipeline.planner.planning.aside import PlanningProcess, plan_batch
from megatron.pipeline.runtime.every_batch import EveryBatch
from megatron.pipeline.runtime.packing import Packing

NUMBERS = (4, 4, 4, 4, 6, 6, 3, 4, 4)  # of microbatches, by iteration


class Trained(NamedTuple):
    """Of a rank.

    Attributes:
        losses: of every iteration and microbatch, a mean over its tokens; those of evaluations as well.
        weights: sums at the end.
        counts: see ``BatchPlans.counts``; empty without plans for every batch.
        orders: how many orders of this rank's passes have run, of iterations that train.
        lines: in the log.
    """

    losses: list[list[float]]
    weights: list[float]
    counts: dict[str, int]
    orders: int
    lines: list[str]


def stream(seed: int, ends: int | None = None) -> Iterator[torch.Tensor]:
    """Microbatches [b, s + 1], a short one mostly; up to 16 tokens, for which the model has positions."""
    own, draw, generator = example("own_training_loop"), random.Random(seed), torch.Generator().manual_seed(seed)
    number = 0
    while ends is None or number < ends:
        length = draw.choice((2, 3, 4, 16))
        yield torch.randint(0, own.VOCABULARY, (own.BATCH, length + 1), generator=generator)
        number += 1


def forward_step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(data)
    batch, length = tokens.shape[0], tokens.shape[1] - 1
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    positions = torch.arange(length).expand(batch, length)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]), lambda losses: (losses.mean(), losses.detach().mean())


def on_time(_: Any, *asked: Any) -> Future[bytes]:
    """In place of ``PlanningProcess.plan``: it is there at once."""
    answer: Future[bytes] = Future()
    try:
        answer.set_result(plan_batch(*asked).packed())
    except ValueError as error:
        answer.set_exception(error)
    return answer


def too_late(_: Any, *asked: Any) -> Future[bytes]:
    """The first two plans are there; later ones are being made for ever."""
    answer = on_time(_, *asked)
    too_late.made += 1  # type: ignore[attr-defined]
    if too_late.made <= 2:  # type: ignore[attr-defined]
        return answer
    late: Future[bytes] = Future()
    late.set_running_or_notify_cancel()
    return late


def train(schedule: str, plans: str = "", announces: bool = False, evaluates: str = "", ends: int | None = None) -> Trained:
    """Iterations of ``NUMBERS`` microbatches.

    Args:
        plans: "" for one plan for all, "on_time" or "too_late" for every batch, "process" where the plans are waited for that a
            process of their own makes, "waited" where the iteration waits for them; with " any" behind it microbatches change
            places.
        announces: there is an iterator for every batch, and the loop announces lengths, unless it is "waited".
        evaluates: forwards alone come in between: of "other" data, or of the "same" iterator.
        ends: iterators have as many microbatches; then there are only iterations for which they suffice.
    """
    own, lines = example("own_training_loop"), list[str]()
    how, _, order = plans.partition(" ")
    real = PlanningProcess.plan
    if how in ("on_time", "too_late"):
        too_late.made = 0  # type: ignore[attr-defined]
        PlanningProcess.plan = {"on_time": on_time, "too_late": too_late}[how]  # type: ignore[method-assign, assignment]
    seconds = 100.0 if how == "waited" else 0.0
    settings = EveryBatch(order=order or "given", lengths_of=_lengths_of, wait=seconds, interval=4, say=lines.append)  # type: ignore[arg-type]
    loop = install(schedule, every_batch=settings) if plans else install(schedule)
    pipeline = loop.pipeline(torch.distributed.get_world_size())
    _make_groups(pipeline.placement.chunks)
    models = own.build()
    models[0].config.variable_seq_lengths = True  # all chunks share it
    wrapped = own.wrap(models)
    optimizer, losses, orders = optimizer_of(wrapped), [], set()
    iterators: list[Any] = [_replayable(schedule, stream(1, ends)) for _ in wrapped]
    batches = pipeline.batches if plans else None

    def call(microbatches: int, data: list[Any], forward_only: bool = False) -> None:
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data,
            model=wrapped,
            num_microbatches=microbatches,
            seq_length=own.LENGTH,
            micro_batch_size=own.BATCH,
            forward_only=forward_only,
        )
        losses.append([float(one) for one in reports])

    data = stream(2)
    following = [next(data) for _ in range(NUMBERS[0])]
    try:
        if announces and plans and not seconds:
            loop.announce([_lengths_of(item) for item in following])
        for iteration, microbatches in enumerate(NUMBERS):
            if ends is not None and sum(NUMBERS[: iteration + 1]) > ends:
                break
            _zero(optimizer, wrapped)
            if announces:
                batch, following = following, [next(data) for _ in range(NUMBERS[(iteration + 1) % len(NUMBERS)])]
                iterators = [iter(batch) for _ in wrapped]
                if plans and not seconds:
                    loop.announce([_lengths_of(item) for item in following])
            if how == "process" and batches is not None and batches._pending:
                batches._pending[0][1].result(timeout=100)
            call(microbatches, iterators)
            if plans:
                assert pipeline._iteration is not None
                orders.add(tuple(pipeline._iteration.plan.schedule.passes[torch.distributed.get_rank()]))
            optimizer.step()
            if evaluates and iteration % 3 == 2:
                call(3, iterators if evaluates == "same" else [stream(3) for _ in wrapped], forward_only=True)
    finally:
        PlanningProcess.plan = real  # type: ignore[method-assign]
    counts = {} if batches is None else dict(batches.counts)
    return Trained(losses, [float(weight.sum()) for model in models for weight in model.parameters()], counts, len(orders), lines)


def _make_groups(chunks: int) -> None:
    parallel_state.initialize_model_parallel(1, torch.distributed.get_world_size(), chunks if chunks > 1 else None)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)


def _replayable(schedule: str, data: Iterator[torch.Tensor]) -> Any:
    """What Megatron-LM makes of an iterator, under one of the schedules."""
    return RerunDataIterator(data) if schedule == "zb-auto" else data


def _zero(optimizer: Any, chunks: list[Any]) -> None:
    optimizer.zero_grad()
    for chunk in chunks:
        chunk.zero_grad_buffer()


def _lengths_of(item: torch.Tensor) -> list[int]:
    return [item.shape[1] - 1] * item.shape[0]


def wrong_lengths(lengths: Any) -> str:
    """The error of a rank where the function of lengths returns these from the first batch on that is read ahead."""
    real = _lengths_of
    globals()["_lengths_of"] = lambda _: lengths
    try:
        train("zb-v", "on_time")
    except ValueError as error:
        return str(error)
    finally:
        globals()["_lengths_of"] = real
    return ""


def several_models(plans: bool) -> Trained:
    """Two models in turn, with other lengths in each of two replicas; gradients of the second are reduced within its passes, so
    that replicas run it in one order."""
    own, real = example("own_training_loop"), PlanningProcess.plan
    PlanningProcess.plan = on_time  # type: ignore[method-assign, assignment]
    try:
        loop = install("zb-v", every_batch=EveryBatch(lengths_of=_lengths_of) if plans else None)
        parallel_state.initialize_model_parallel(1, 2, 2)
        tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        models, losses, orders = [], [], set()
        for overlaps in (False, True):
            chunks = own.build()
            chunks[0].config.variable_seq_lengths = True
            wrapped = own.wrap(chunks, overlap_grad_reduce=overlaps, bucket_size=5000)
            models.append((wrapped, optimizer_of(wrapped)))
        data = stream(10 * parallel_state.get_data_parallel_rank())
        batches = [list(islice(data, 6)) for _ in range(9)]
        for number, (batch, following) in enumerate(pairwise(batches)):
            wrapped, optimizer = models[number % 2]
            if plans:
                for announced in (batch, following)[number > 0 :]:
                    loop.announce([_lengths_of(item) for item in announced])
            _zero(optimizer, wrapped)
            reports = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(batch) for _ in wrapped],
                model=wrapped,
                num_microbatches=6,
                seq_length=own.LENGTH,
                micro_batch_size=own.BATCH,
            )
            optimizer.step()
            losses.append([float(one) for one in reports])
            if plans:
                orders.add(loop.pipeline(2)._iteration.plan.schedule.passes)  # type: ignore[union-attr]
        weights = [float(weight.sum()) for wrapped, _ in models for chunk in wrapped for weight in chunk.parameters()]
        made = loop.pipeline(2).batches
        return Trained(losses, weights, dict(made.counts) if made else {}, len(orders), [])
    finally:
        PlanningProcess.plan = real  # type: ignore[method-assign]


def announces_in_vain() -> str:
    loop = install("zb-auto")
    parallel_state.initialize_model_parallel(1, 1)
    try:
        loop.announce([[5]])
    except ValueError as error:
        return str(error)
    return ""


class _Unequal(tiny_gpt.Run):
    """Microbatches of lengths that tensor and context parallel ranks can cut; every replica has its own."""

    def lengths(self, iteration: int) -> list[int]:
        draw = random.Random(100 * iteration + parallel_state.get_data_parallel_rank())
        return [draw.choice((4, 4, 8, 16)) for _ in range(self.microbatches)]

    def _tokens(self, iteration: int) -> Iterator[torch.Tensor]:
        for length, tokens in zip(self.lengths(iteration), super()._tokens(iteration), strict=True):
            yield tokens[:, : length + 1]


class Parallel(NamedTuple):
    """Of a rank.

    Attributes:
        counts: see ``BatchPlans.counts``; empty without plans for every batch.
        orders: how many orders of passes have run.
        lengths: of the microbatches of each iteration.
        planned: the tokens that each iteration was planned for, over those of its first microbatch.
    """

    steps: list[tiny_gpt.Step]
    counts: dict[str, int]
    orders: int
    lengths: list[list[int]]
    planned: list[list[float]]


def in_parallel(schedule: str, flags: str, plans: bool, **sizes: Any) -> Parallel:
    """Three iterations, with a plan for each where asked for."""
    real, PlanningProcess.plan = PlanningProcess.plan, on_time  # type: ignore[method-assign, assignment]
    try:
        more = "--pipeline-plan every-batch" if plans else ""
        run = _Unequal(schedule, flags=tuple(f"{flags} {more}".split()), microbatches=6, **sizes)
        for chunk in run.chunks:
            get_model_config(chunk).variable_seq_lengths = True
        steps, orders, lengths, planned = [], set(), [], []
        for iteration in range(-1, 3):
            if plans and iteration < 2:  # one iteration before
                run.pipeline.batches.announce([[length] * 2 for length in run.lengths(iteration + 1)])  # type: ignore[union-attr]
            if iteration >= 0:
                steps.append(run.step(iteration))
            if plans and iteration >= 0:
                plan = run.pipeline._iteration.plan  # type: ignore[union-attr]
                orders.add(plan.schedule.passes)
                lengths.append(run.lengths(iteration))
                planned.append([load.tokens / plan.problem.costs.loads[0].tokens for load in plan.problem.costs.loads])
        counts = dict(run.pipeline.batches.counts) if run.pipeline.batches else {}
        return Parallel(steps, counts, len(orders), lengths, planned)
    finally:
        PlanningProcess.plan = real  # type: ignore[method-assign]


def announces_other_numbers(flags: str) -> str:
    """The error of a rank whose replica announces another number of microbatches than the other one."""
    run = _Unequal("zb-v", pp=2, microbatches=6, flags=(*flags.split(), "--pipeline-plan", "every-batch"))
    assert run.pipeline.batches is not None
    run.pipeline.batches.announce([[4]] * (6 + parallel_state.get_data_parallel_rank()))
    try:
        run.step(0)
    except ValueError as error:
        return str(error)
    return ""


def _packed_items(seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Items of 16 tokens as ``--sft`` gives them: one to three sequences, the last of which is padded."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    while True:
        lengths = [draw.choice((2, 4, 5)) for _ in range(draw.choice((1, 1, 2, 3)))]
        tokens = torch.randint(1, 60, (1, 17), generator=generator)
        positions = torch.cat([torch.arange(length) for length in (*lengths[:-1], 16 - sum(lengths[:-1]))])[None]
        counted = (torch.arange(16) < sum(lengths)).float()[None]
        bounds = torch.tensor([[0, *accumulate(lengths[:-1]), 16]], dtype=torch.int32)
        item = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": counted, "position_ids": positions}
        yield item | {"cu_seqlens": bounds, "max_seqlen": bounds.diff().max().reshape(1)}


def _packed_step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
    item = next(data)
    bounds, counted = item["cu_seqlens"][0], item["loss_mask"]
    document = torch.bucketize(torch.arange(item["tokens"].shape[1]), bounds[1:], right=True)
    hidden = (document[:, None] != document[None]) | torch.ones(len(document), len(document), dtype=torch.bool).triu(1)
    output = model(item["tokens"], item["position_ids"], hidden[None, None], labels=item["labels"])
    sequences = [tuple(item["tokens"][0, begin:end].tolist()) for begin, end in pairwise(bounds.tolist())]
    return output, lambda losses: ((losses * counted).sum() / counted.sum(), (float((losses * counted).sum()), sequences))


class _PerSequence(torch.nn.Module):
    """Attention to packed sequences [t, heads, width], which megatron-core's own refuses, by that one on each of them."""

    def __init__(self, one: torch.nn.Module, seen: list[tuple[int, list[int]]]) -> None:
        super().__init__()
        self.one, self.seen = one, seen

    def forward(self, query: Any, key: Any, value: Any, _: Any, *, packed_seq_params: Any, **options: Any) -> torch.Tensor:
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        self.seen.append((len(query), bounds))
        outputs = []
        for begin, end in pairwise(bounds):
            hidden = torch.ones(1, 1, end - begin, end - begin, dtype=torch.bool).triu(1)
            outputs.append(self.one(*(each[begin:end, None] for each in (query, key, value)), hidden, **options))
        return torch.cat(outputs)


def _thd_step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """As Megatron-LM does it: one of the tensor-parallel ranks reads, on every stage."""
    read = [next(data)] if data else [None]
    source, group = parallel_state.get_tensor_model_parallel_src_rank(), parallel_state.get_tensor_model_parallel_group()
    torch.distributed.broadcast_object_list(read, source, group=group)
    item: Any = read[0]
    bounds, longest, counted = item["cu_seqlens"][0], int(item["max_seqlen"]), item["loss_mask"]
    packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)
    output = model(item["tokens"], item["position_ids"], None, labels=item["labels"], packed_seq_params=packed)
    sequences = [tuple(item["tokens"][0, begin:end].tolist()) for begin, end in pairwise(bounds.tolist())]
    return output, lambda losses: ((losses * counted).sum() / counted.sum(), (float((losses * counted).sum()), sequences))


def packs(
    schedule: str, padded: bool, plans: bool = False, thd: bool = False
) -> tuple[list[Any], list[int], dict[str, int], list[tuple[int, list[int]]]]:
    """Three iterations on packings of 6 items for each of 2 replicas, each run twice, as upstream does where it doubts a result:
    reports, numbers of microbatches, ``BatchPlans.counts``, and with ``thd`` the tokens and bounds that attention has seen.

    Args:
        thd: there is one replica, with 2 tensor-parallel ranks, whose layers get ``packed_seq_params``.
    """
    real, PlanningProcess.plan = PlanningProcess.plan, on_time  # type: ignore[method-assign, assignment]
    machine = get_rerun_state_machine()
    machine.get_mode = lambda: RerunMode.VALIDATE_RESULTS  # iterators keep what they give
    try:
        flags = (
            f"--micro-batch-size 1 --global-batch-size {6 if thd else 12} --clip-grad 0" + " --pipeline-plan every-batch" * plans
        )
        run = tiny_gpt.Run(schedule, pp=2, tp=1 + thd, microbatches=6, flags=tuple(flags.split()))
        get_model_config(run.chunks[0]).variable_seq_lengths = not padded
        batches = run.pipeline.batches
        packing, again = Packing(16, 2, 0.1, batches.announce if batches else None), Packing(16, 2)
        reads = not parallel_state.get_tensor_model_parallel_rank()
        source = partial(_packed_items, parallel_state.get_data_parallel_rank())
        data: list[Any] = [RerunDataIterator(source()) if reads else None for _ in run.chunks]
        seen: list[tuple[int, list[int]]] = []
        for layer in (one for chunk in run.chunks for one in chunk.modules() if thd and hasattr(one, "core_attention")):
            layer.core_attention = _PerSequence(layer.core_attention, seen)  # type: ignore[assignment, arg-type]
        step = _thd_step if thd else _packed_step
        sizes = {"num_microbatches": 6, "seq_length": 16, "micro_batch_size": 1}
        found, numbers = [], []
        for _ in range(3):
            for one in (packing, again):  # the other as of a process that goes on from a checkpoint
                _zero(run.optimizer, run.chunks)
                keywords = one.packed({"forward_step_func": step, "data_iterator": data, "model": run.chunks, **sizes})
                single = keywords if len(run.chunks) > 1 else keywords | {"data_iterator": data[0], "model": run.chunks[0]}
                found.append(get_forward_backward_func()(**single))
                numbers.append(keywords["num_microbatches"])
                for items in filter(None, data):
                    items.rewind()
            for items in filter(None, data):
                items.advance()
            run.optimizer.step()
        assert found[::2] == found[1::2] and numbers[::2] == numbers[1::2]
        return found[::2], numbers[::2], dict(batches.counts) if batches else {}, seen
    finally:
        PlanningProcess.plan = real  # type: ignore[method-assign]
        del machine.get_mode


def sequences_of(replica: int, iterations: int) -> list[tuple[int, ...]]:
    """What a replica's items of these iterations have, without padding."""
    found = []
    for item in islice(_packed_items(replica), 6 * iterations):
        for begin, end in pairwise(item["cu_seqlens"][0].tolist()):
            found.append(tuple(item["tokens"][0, begin : min(end, int(item["loss_mask"].sum()))].tolist()))
    return found
