"""What tests/session/test_own_loop.py runs on the pool: loops as frameworks have them, which know nothing of a schedule."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import reductions
import torch
from example_runs import example, optimizer_of
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from runtime import batches

from megatron.pipeline import install
from megatron.pipeline.planner import kinds, ops
from megatron.pipeline.planner.planning.aside import PlanningProcess
from megatron.pipeline.planner.planning.plan_cache import PlanCache
from megatron.pipeline.planner.planning.planned import Planned


class Trained(NamedTuple):
    """Of a rank.

    Attributes:
        losses: of every iteration, by microbatch; empty but on the last rank.
        norms: of the gradients, of every iteration.
        weights: all of them, at the end.
        planned: which share of B the W of every stage is planned to take; empty under megatron-core's own schedule.
        early: of all buckets, how many were being reduced when the last pass of the last iteration ended; not under stock.
        buckets: of the chunk.
        orders: of all passes, of every iteration; not under stock.
    """

    losses: list[list[float]]
    norms: list[float]
    weights: list[float]
    planned: list[float]
    early: int
    buckets: int
    orders: list[Any]


def one_chunk(frozen: str) -> Any:
    """The one chunk of this rank, as any builder makes it who knows no schedule."""
    [model] = example("own_training_loop").build(share_embeddings_and_output_weights=True)
    for name, weight in model.named_parameters():
        weight.requires_grad_(not frozen or frozen not in name)
    return model


def _iterate(chunk: Any, pipeline: int, data: list[torch.Tensor], forward_only: bool = False) -> list[float]:
    """The losses of an iteration by microbatch, on the last rank; of a function that was imported by its name."""
    own = example("own_training_loop")
    iterate = forward_backward_pipelining_without_interleaving if pipeline > 1 else forward_backward_no_pipelining
    reports = iterate(
        forward_step_func=own.forward_step,
        data_iterator=iter(data),
        model=chunk,
        num_microbatches=len(data),
        seq_length=own.LENGTH,
        micro_batch_size=own.BATCH,
        forward_only=forward_only,
    )
    return [float(one.mean()) for one in reports]


def later(costs: str, fails: bool) -> Trained:
    """``train`` where a search ends, or fails, while the first iteration of a number of microbatches runs."""
    real, PlanningProcess.plan = PlanningProcess.plan, broken if fails else batches.on_time  # type: ignore[method-assign, assignment]
    try:
        return train("zb-auto", costs=costs, counts=LATER)
    finally:
        PlanningProcess.plan = real  # type: ignore[method-assign]


def evaluates_alone(costs: str) -> int:
    """Microbatches of an evaluation that one of two replicas runs more often than the other, while a search goes on."""
    real, PlanningProcess.plan = PlanningProcess.plan, lambda *_: Future()  # type: ignore[method-assign, assignment]
    try:
        train("zb-auto", 2, costs=costs, counts=(4,))
        from megatron.core import parallel_state

        for _ in range(1 + (parallel_state.get_data_parallel_rank() == 0)):
            losses = _iterate(one_chunk(""), 2, example("own_training_loop").batches(5, seed=9), forward_only=True)
        return len(losses)
    finally:
        PlanningProcess.plan = real  # type: ignore[method-assign]


LATER = (6, 6, 4, 6)  # microbatches of the iterations of ``later``


def broken(*_: Any) -> Future[bytes]:
    answer: Future[bytes] = Future()
    answer.set_exception(ChildProcessError("it has ended"))
    return answer


def train(
    schedule: str,
    pipeline: int = 4,
    frozen: str = "",
    overlap: bool = False,
    costs: str | None = None,
    counts: tuple[int, ...] = (4, 6, 3),
) -> Trained:
    """Some iterations of a loop that gives one module, and not a list.

    Args:
        frozen: weights with this in their names do not train.
        overlap: DDP reduces gradients within the backward, aligned between pipeline ranks, as megatron-core's default is, and
            gathers weights within the forward.
        costs: a file, by which buckets are planned, too.
        counts: microbatches of every iteration.
    """
    own = example("own_training_loop")
    loop = install(schedule, costs)
    parallel_state.initialize_model_parallel(1, pipeline)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    model = one_chunk(frozen)
    shared = {"use_distributed_optimizer": overlap, "overlap_param_gather": overlap}
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=overlap, bucket_size=None if costs else 5000, **shared)
    chunk = DistributedDataParallel(model.config, ddp, model)
    model.config.finalize_model_grads_func = finalize_model_grads
    if overlap:
        model.config.no_sync_func, model.config.grad_sync_func = chunk.no_sync, chunk.start_grad_sync
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0, **shared), [chunk])
    # A model for log-probabilities, in no DDP, comes first.
    losses, norms = [_iterate(one_chunk(""), pipeline, own.batches(5, seed=9), forward_only=True)], []
    orders: list[Any] = []
    with reductions.noted() as buckets:
        for seed, microbatches in enumerate(counts):
            data = own.batches(microbatches, seed=seed + 10 * parallel_state.get_data_parallel_rank())
            optimizer.zero_grad()
            chunk.zero_grad_buffer()
            losses.append(_iterate(chunk, pipeline, data))
            norms.append(float(optimizer.step()[1]))
            if schedule != "stock":
                iteration = loop.pipeline(pipeline)._iteration
                assert iteration is not None
                orders.append(iteration.plan.schedule.passes)
    planned = []
    if schedule != "stock":
        assert loop.pipeline(pipeline).microbatches == microbatches, "another function has run"
        planned = [stage.weight / stage.backward for stage in loop.pipeline(pipeline).plans.planned_costs.stages]
    if overlap:
        chunk.start_param_sync(force_sync=True)
    early, weights = sum(buckets[-1].reduced) if buckets else 0, [float(weight.sum()) for weight in model.parameters()]
    return Trained(losses, norms, weights, planned, early, len(chunk.bucket_groups), orders)


def stays_away(rank: int, port: int, stderr: Path, calls: int) -> None:
    """One of 4 processes without a launcher. Rank 2 calls that many times and then no more; the others go on. Where it calls at
    all, the schedule is installed again when the model is there."""
    chunk = _watched(rank, port, stderr)
    if calls:
        install("zb-h1", watchdog=2.0).pipeline(4).plans.plan(4)
    time.sleep(3.0)  # in its own code a loop may stay longer
    for call in range(2):
        if rank != 2 or call < calls:
            _iterate(chunk, 4, example("own_training_loop").batches(4, seed=call))
    time.sleep(60)


def enter_alone(rank: int, port: int, stderr: Path) -> None:
    """One of 4 processes without a launcher. Behind a call of all, ranks 2 and 3 call for forwards alone several times, as
    loops do that take only the ranks of the loss for an evaluation."""
    chunk = _watched(rank, port, stderr)
    data = example("own_training_loop").batches(4, seed=0)
    _iterate(chunk, 4, data)
    for _ in range(3 if rank > 1 else 0):
        _iterate(chunk, 4, data, forward_only=True)
    time.sleep(60)


def is_killed(rank: int, port: int, stderr: Path, calls: int) -> None:
    """One of 4 processes without a launcher. Rank 2 is killed behind that many calls."""
    chunk = _watched(rank, port, stderr)
    for call in range(2):
        if (rank, call) == (2, calls):
            os.kill(os.getpid(), signal.SIGKILL)
        _iterate(chunk, 4, example("own_training_loop").batches(4, seed=call))


def plans_longer(rank: int, port: int, stderr: Path) -> None:
    """One of 4 processes without a launcher. Rank 2 plans for twice as long as an iteration may stand still."""
    chunk, plan = _watched(rank, port, stderr), PlanCache.plan

    def slow(plans: PlanCache, microbatches: int, forward_only: bool = False) -> Planned:
        time.sleep(4.0 if microbatches not in plans.planned else 0.0)
        return plan(plans, microbatches, forward_only)

    PlanCache.plan = slow if rank == 2 else plan  # type: ignore[method-assign, assignment]
    _iterate(chunk, 4, example("own_training_loop").batches(3, seed=0))


def _watched(rank: int, port: int, stderr: Path) -> Any:
    """The chunk of a process that starts without a launcher, and of which the others expect a sign every 2 s."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="localhost", MASTER_PORT=str(port))
    with stderr.open("a") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    install("zb-h1", watchdog=2.0).pipeline(4).plans.plan(4)  # ranks may plan one after the other
    parallel_state.initialize_model_parallel(1, 4)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    model = one_chunk("")
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


class Adapted(torch.nn.Module):
    """A frozen linear with adapters beside it that are torch's own linears, as peft's are."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        outputs, inputs = linear.weight.shape
        self.base_layer = linear.requires_grad_(False)
        self.lora_A = torch.nn.Linear(inputs, 4, bias=False)
        self.lora_B = torch.nn.Linear(4, outputs, bias=False)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = self.base_layer(hidden)
        return output + 2.0 * self.lora_B(self.lora_A(hidden)), bias


class LowRank(NamedTuple):
    """Of a rank: losses by iteration and microbatch, norms before clipping, trained weights by name, planned W of stages; how
    many stages have no B, and the stages whose gradients it has sent or received last."""

    losses: list[list[float]]
    norms: list[float]
    weights: dict[str, list[float]]
    planned: list[float]
    frozen: int
    gradients: set[int]


def adapters(schedule: str, pipeline: int, recomputes: bool = False) -> LowRank:
    """Steps of a model of 8 layers in which adapters of layers 3 and 4 train alone, on 4 ranks, with clipping; replicas have a
    distributed optimizer, and reduce gradients within the backward."""
    own, distributed = example("own_training_loop"), pipeline < 4
    chunks = 2 if schedule in ("zb-v", "v-auto") else None
    loop = install(schedule)
    parallel_state.initialize_model_parallel(1, pipeline, chunks)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    models = own.build()
    for model in models:
        model.requires_grad_(False)
        if recomputes:
            recompute_all(model.config)
        for layer in model.decoder.layers:
            for module in list(layer.modules()) if layer.layer_number in (3, 4) else []:
                for name, child in list(module.named_children()):
                    if isinstance(child, (ColumnParallelLinear, RowParallelLinear)):
                        setattr(module, name, Adapted(child))
    example("random_tokens").draw(models)
    wrapped = own.wrap(models, use_distributed_optimizer=distributed, overlap_grad_reduce=distributed)
    syncs = [chunk.no_sync for chunk in wrapped]
    models[0].config.no_sync_func = syncs[0] if len(syncs) == 1 else syncs
    settings = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1e-3, use_distributed_optimizer=distributed)
    optimizer, losses, norms = get_megatron_optimizer(settings, wrapped), [], []
    for seed, microbatches in enumerate((4, 6, 3)):
        found, norm = own.run(wrapped, own.batches(microbatches, seed + 10 * parallel_state.get_data_parallel_rank()), optimizer)
        losses.append([float(one.mean()) for one in found])
        norms.append(float(norm))
    weights = {
        f"{layer.layer_number}.{name}": weight.flatten().tolist()
        for model in models
        for layer in model.decoder.layers
        for name, weight in layer.named_parameters()
        if weight.requires_grad
    }
    if schedule == "stock":
        return LowRank(losses, norms, weights, [], 0, set())
    made = loop.pipeline(pipeline)
    assert made._iteration and made._iteration.executor
    sent = [one.message for one in made._iteration.executor.program if isinstance(one, (ops.Send, ops.Receive))]
    gradients = {message.stage for message in sent if message.flow is kinds.Flow.GRADIENT}
    planned = [stage.weight / (stage.backward or 1) for stage in made.plans.planned_costs.stages]
    return LowRank(losses, norms, weights, planned, made.plans.frozen, gradients)


def recompute_all(config: Any) -> None:
    """All layers, within the backward."""
    config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1


def overlapping(schedule: str, late: bool) -> tuple[list[list[float]], list[float], bool]:
    """Losses of 4 steps and norms of 2 pipeline ranks with replicas, with all overlaps that frameworks' own recipes set: those of
    Megatron Bridge, verl, slime and ms-swift; and whether the loop's settings of DDP are as they were.

    Args:
        late: weights are gathered within forwards from the second step on, as in Megatron Bridge, and in slime by rollout.
    """
    own, several = example("own_training_loop"), schedule == "zb-v"
    install(schedule)
    parallel_state.initialize_model_parallel(1, 2, 2 if several else None)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    models, shared = own.build(), {"use_distributed_optimizer": True, "overlap_param_gather": True}
    # Megatron Bridge aligns gathers of several chunks, others by a flag of theirs.
    given = DistributedDataParallelConfig(overlap_grad_reduce=True, align_param_gather=several, bucket_size=5000, **shared)
    before, config = replace(given), models[0].config
    config.finalize_model_grads_func = own.finalize_model_grads
    config.overlap_p2p_comm, config.batch_p2p_comm = several, not several
    chunks = [DistributedDataParallel(config, given, model, disable_bucketing=place > 0) for place, model in enumerate(models)]
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0, **shared), chunks)

    def each(name: str) -> Any:
        found = [getattr(chunk, name) for chunk in chunks]
        return found if several else found[0]

    config.no_sync_func, config.grad_sync_func = each("no_sync"), each("start_grad_sync")
    losses, norms = [], []
    for step, microbatches in enumerate((4, 2, 6, 4)):
        for chunk in chunks if late and step < 2 else ():
            chunk.enable_forward_pre_hook() if step else chunk.disable_forward_pre_hook(param_sync=False)
        if step or not late:
            config.param_sync_func = each("start_param_sync")
        data = own.batches(microbatches, seed=step + 10 * parallel_state.get_data_parallel_rank())
        reports, norm = own.run(chunks, data, optimizer)
        losses.append([float(one.mean()) for one in reports] if parallel_state.is_pipeline_last_stage() else [])
        norms.append(float(norm))
    return losses, norms, given == before


def recomputed(schedule: str, recomputes: bool) -> float:
    """The norm of gradients of adapters in all layers of a frozen model."""
    own = example("own_training_loop")
    own.plan(schedule)
    models = own.build()
    if recomputes:
        recompute_all(models[0].config)
    example("lora").adapt(models)
    chunks = own.wrap(models)
    return float(own.run(chunks, own.batches(4, seed=0), optimizer_of(chunks))[1])


class Several(NamedTuple):
    """Of a rank: of every iteration what was reported, and the norm; sums of all weights; a refusal, if there was one."""

    losses: list[list[float]]
    norms: list[float]
    weights: list[float]
    refused: str


def several_models(schedule: str, again: str | None = None) -> Several:
    """An actor and a critic in turn, each with its own optimizer; forwards alone come first, the number of microbatches changes
    with every step, and is 1; then the actor is made anew, with frozen ends; at last a critic whose tied ends differ.

    Args:
        again: installed behind the first half, models stay.
    """
    own = example("own_training_loop")
    own.plan(schedule)

    def made(frozen: bool = False, tied: bool = False, frozen_ends: bool = False) -> tuple[list[Any], Any]:
        built = own.build(share_embeddings_and_output_weights=tied)
        for end in (model for model in built if tied and (model.pre_process or model.post_process)):
            end.shared_embedding_or_output_weight().data.normal_(std=0.1, generator=torch.Generator().manual_seed(5))
        for layer in (layer for model in built if frozen for layer in model.decoder.layers if layer.layer_number > 2):
            layer.mlp.requires_grad_(False)
        for name, weight in ((name, weight) for model in built if frozen_ends for name, weight in model.named_parameters()):
            weight.requires_grad_("decoder.layers" in name)
        chunks = own.wrap(built)
        return chunks, optimizer_of(chunks)

    losses, norms = [], []
    models = [made(), made(frozen=True, tied=True)]
    for step, (which, microbatches, trains) in enumerate(
        ((0, 3, False), (0, 1, True), (1, 4, True), (1, 2, False), (0, 2, True), (1, 1, True), (0, 5, True), (1, 3, True))
    ):
        if step == 4:
            models[0] = made(frozen_ends=True) if again is None else models[0]
            install(again) if again else None
        chunks, optimizer = models[which]
        reports, norm = own.run(chunks, own.batches(microbatches, seed=step), optimizer if trains else None)
        losses.append([float(one.mean()) for one in reports] if parallel_state.is_pipeline_last_stage() else [])
        norms.append(float(norm))
    weights = [float(weight.sum()) for chunks, _ in models for chunk in chunks for weight in chunk.parameters()]
    chunks, optimizer = made(tied=True)
    for weight in [model.module.shared_embedding_or_output_weight() for model in chunks if model.module.pre_process]:
        weight.data.add_(1)
    return Several(losses, norms, weights, refused(lambda: own.run(chunks, own.batches(2, seed=0), optimizer)))


def refused(make: Callable[[], Any]) -> str:
    try:
        make()
    except ValueError as error:
        return str(error)
    return ""
