"""The vocabulary in shards within the model: stock's initial weights, checkpoints that stock reads and writes, DDP and TP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from marked import rest
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import unwrap_model
from model.vocabulary_case import Case
from pool import Pool

from megatron.pipeline.distributed.sequence import complete
from megatron.pipeline.flags import config
from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.validation import validate
from megatron.pipeline.model.build import build_model
from megatron.pipeline.model.split_linear import split_weights
from megatron.pipeline.model.vocabulary.input import EmbeddingShard
from megatron.pipeline.model.vocabulary.loss import Statistics, weigh
from megatron.pipeline.model.vocabulary.output import OutputShard
from megatron.pipeline.model.vocabulary.shard import VocabularyShard
from megatron.pipeline.model.vocabulary.tied import TiedGradient
from megatron.pipeline.planner.schedule.core import placement
from megatron.pipeline.session.groups import initialize_model_parallel
from megatron.pipeline.session.tokenizer import sizes_of_vocabulary
from megatron.pipeline.trainer import checkpoint
from megatron.pipeline.trainer.state import build_training

FLAGS = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1e-2 --seed 7 --micro-batch-size 2 "
    "--global-batch-size 24 --train-iters 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 37 "
    "--make-vocab-size-divisible-by 4 --pipeline-schedule 1f1b"
)
EMBEDDING, OUTPUT, POSITIONS = "embedding.word_embeddings.weight", "output_layer.weight", "embedding.position_embeddings.weight"


def build(flags: str, v: bool = False, gpu_initialization: bool = False) -> tuple[Any, Any]:
    """Flags and everything that they train, without a schedule to do it."""
    args = validate(parse(f"{FLAGS} {flags}".split()), torch.distributed.get_world_size())
    args |= sizes_of_vocabulary(args.vocab_size, args)
    ranks = args.pipeline_model_parallel_size
    stages = placement.v(ranks) if v else placement.linear(ranks)
    initialize_model_parallel(args, stages)
    if not gpu_initialization:
        return args, build_training(args, stages)
    settings = config.transformer_config(args, stages)
    settings.use_cpu_initialization = False
    return args, build_model(args, settings, stages)


def initial(flags: str, v: bool = False, gpu_initialization: bool = False) -> dict[str, torch.Tensor]:
    """The whole weights at both ends of the model, on every rank."""
    _, built = build(flags, v, gpu_initialization)
    found: dict[str, torch.Tensor] = {}
    for chunk in unwrap_model(built if gpu_initialization else built.chunks):
        for name, parameter in chunk.named_parameters():
            if name.startswith(("embedding", "output_layer", "vocabulary")):
                found[name] = parameter.detach()
            if name.startswith("vocabulary"):  # the gradient's norm counts every shard, and decoupled learning rates find it
                assert parameter.tensor_model_parallel and parameter.is_embedding_or_output_parameter
                assert not hasattr(parameter, "shared")
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    pipeline_rank = parallel_state.get_pipeline_model_parallel_rank()
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, ((pipeline_rank, tensor_rank), found))
    names = {"vocabulary.embedding.weight": EMBEDDING, "vocabulary.output.weight": OUTPUT}
    whole: dict[str, list[torch.Tensor]] = {}
    for (_, rank), parts in sorted(everyone, key=lambda one: one[0]):
        for name, part in parts.items():
            if name != POSITIONS or rank == 0:
                whole.setdefault(names.get(name, name), []).append(part)
    return {name: torch.cat(parts) for name, parts in whole.items()}


@pytest.mark.parametrize("gpu_initialization", [False, True])
@pytest.mark.parametrize(
    ("pp", "tp", "flags"),
    [
        (3, 1, ""),
        (2, 2, "--untie-embeddings-and-output-weights"),
        (2, 2, "--untie-embeddings-and-output-weights --bf16 --num-virtual-stages-per-pipeline-rank 2"),
        (2, 1, "--untie-embeddings-and-output-weights --position-embedding-type rope"),
    ],
)
def test_initial_weights_are_stock(pool: Pool, pp: int, tp: int, flags: str, gpu_initialization: bool) -> None:
    layout = f"{flags} --tensor-model-parallel-size {tp}"
    here = f"{layout} --pipeline-model-parallel-size {pp} --vocab-parallel 2"
    shards = pool.run(pp * tp, initial, here, v="virtual" in flags, gpu_initialization=gpu_initialization)[0]
    stock = pool.run(tp, initial, layout.replace("--num-virtual-stages-per-pipeline-rank 2", ""), False, gpu_initialization)[0]
    assert shards.keys() == stock.keys() and len(stock) == 1 + ("untie" in flags) + ("rope" not in flags)
    for name, weight in stock.items():
        assert weight.any() and torch.equal(shards[name][: len(weight)], weight), name
        assert not shards[name][len(weight) :].any(), name


def pass_on(flags: str) -> None:
    """Load a checkpoint and save it again; without one, take a step with random gradients first."""
    args, training = build(flags)
    if args.load:
        assert checkpoint.load(args, training)
    else:
        generator = torch.Generator().manual_seed(parallel_state.get_pipeline_model_parallel_rank())
        for chunk in training.chunks:
            for parameter in chunk.parameters():
                parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
            vocabulary = unwrap_model(chunk).vocabulary
            for parameter in vocabulary.parameters():
                parameter.main_grad[vocabulary.shards.stored(vocabulary.index) :] = 0
        training.optimizer.step()
    checkpoint.save(args, training)


def contents(directory: str) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its global name."""
    found = dist_checkpointing.load_plain_tensors(f"{directory}/iter_0000000")
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}


@pytest.mark.parametrize(
    ("ranks", "pp", "flags", "last"),
    [
        rest(3, 3, "", "--make-vocab-size-divisible-by 48"),
        rest(4, 2, "--untie-embeddings-and-output-weights --use-distributed-optimizer --bf16", "--tensor-model-parallel-size 2"),
        (4, 4, "--untie-embeddings-and-output-weights --bf16", ""),
    ],
    ids=["tied-more-padding", "distributed-optimizer-tensor-parallel", "bf16-empty-shard"],
)
def test_stock_reads_and_writes_the_same_checkpoints(
    pool: Pool, tmp_path: Path, ranks: int, pp: int, flags: str, last: str
) -> None:
    shards = f"{flags} --vocab-parallel 2 --pipeline-model-parallel-size"
    a, b, c = (f"{tmp_path}/{name}" for name in "abc")
    pool.run(ranks, pass_on, f"{shards} {pp} --save {a}")
    pool.run(2, pass_on, f"{flags} --load {a} --save {b}")  # dense, two data-parallel ranks
    pool.run(4, pass_on, f"{shards} 2 {last} --load {b} --save {c}")
    first, dense, third = (pool.run(1, contents, directory)[0] for directory in (a, b, c))
    assert first.keys() == dense.keys() == third.keys()
    assert first[EMBEDDING].shape == (40, 16) and (OUTPUT in first) == ("untie" in flags)
    assert any("exp_avg" in name and EMBEDDING in name and first[name].any() for name in first)
    for name, tensor in first.items():
        assert torch.equal(tensor, dense[name]) and torch.equal(tensor, third[name][: len(tensor)]), name
        assert not third[name][len(tensor) :].any(), name


def over_tensor_parallel_ranks(sequence_parallel: bool) -> list[float]:
    """Differences from one process: losses, both variants' gradients by the hidden states and weights, and the input layer."""
    parallel_state.initialize_model_parallel(2)
    group, rank = parallel_state.get_tensor_model_parallel_group(), torch.distributed.get_rank()
    case = Case(size=13, stock_rows=14, count=2, sequence=4, label_smoothing=0.1)
    parts, shape = (2 if sequence_parallel else 1), (case.batch, case.sequence)

    def own(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(2)[rank] if sequence_parallel else whole

    differences = []
    for one_barrier in (False, True):
        losses, by_hidden, by_weight = case.sharded(one_barrier)
        weight: Any = case.parameter(rank)
        layer = OutputShard(weight, case.shards, rank, case.loss, group, sequence_parallel)
        layer.register_wgrad_accumulation_and_reduce_hooks(lambda: None)
        part = layer(own(case.hidden), case.labels, one_barrier)
        assert part.held[0].shape == own(case.hidden).shape
        gathered = torch.empty(2, *part.statistics.shape)
        torch.distributed.all_gather_into_tensor(gathered, part.statistics[None])
        statistics = Statistics(gathered, case.loss, shape, case.shards.total_counted)
        if one_barrier:
            gradient = complete(part.input_gradient(statistics), group, sequence_parallel)
            gradient = weigh(gradient, case.weights, rank % parts, parts)
            part.backward(statistics, case.weights, False)
        else:
            gradient = part.backward(statistics, case.weights, True)
            assert gradient is not None
            gradient = complete(gradient, group, sequence_parallel)
        rows = case.shards.own(rank)
        expected = by_weight[rows.start : rows.stop]
        differences += [(statistics.losses - losses).abs().max(), (gradient - own(by_hidden)).abs().max()]
        differences.append((weight.main_grad[: len(expected)] - expected).abs().max())

    table: Any = case.parameter(rank)
    embedding = EmbeddingShard(table, case.shards, rank, group, sequence_parallel)
    embedding.register_wgrad_accumulation_and_reduce_hooks(lambda: None)
    output = complete(embedding(case.labels), group, sequence_parallel)
    looked_up = case.weight[case.labels]
    differences.append((output - (own(looked_up.transpose(0, 1)) if sequence_parallel else looked_up)).abs().max())
    embedding.backward(case.labels, own(case.hidden) if sequence_parallel else case.hidden.transpose(0, 1))
    reference = torch.zeros(2 * case.shards.rows, case.weight.size(1))
    reference.index_add_(0, case.labels.t().flatten(), case.hidden.flatten(0, 1))
    differences.append((table.main_grad - reference[case.shards.own(rank).start : case.shards.own(rank).stop]).abs().max())
    return [difference.item() for difference in differences]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_and_sequence_parallel(pool: Pool, sequence_parallel: bool) -> None:
    for differences in pool.run(2, over_tensor_parallel_ranks, sequence_parallel):
        assert len(differences) == 8 and max(differences) < 1e-5


def readiness(tied: bool) -> tuple[list[bool], float]:
    """Whether DDP has started to reduce, after S, T and IB of the last microbatch; and the gradient's error."""
    parallel_state.initialize_model_parallel()
    case = Case(count=1, batch=1, sequence=6)

    first, second = (torch.nn.Parameter(case.parameter(0).detach().clone()) for _ in range(2))
    together = TiedGradient() if tied else None
    embedding = EmbeddingShard(first, case.shards, 0, tied=together)
    output = OutputShard(first if tied else second, case.shards, 0, case.loss, tied=together)
    shard = VocabularyShard(case.shards, 0, case.loss, embedding, output)
    assert len(list(shard.parameters())) == (1 if tied else 2) and (output.weight is embedding.weight) == tied
    assert split_weights(shard) == []
    config = TransformerConfig(num_layers=1, hidden_size=12, num_attention_heads=1, use_cpu_initialization=True)
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, delay_wgrad_compute=True)
    model = DistributedDataParallel(config, ddp, shard)
    started: list[bool] = []
    for _iteration in range(2):  # DDP learns in the first what to expect
        model.zero_grad_buffer()
        if together:
            together.expect(microbatches=2)
        group = model.bucket_groups[0]
        for last in (False, True):
            group.is_last_microbatch = last
            embedding(case.labels)
            part = output(case.hidden, case.labels, False)
            statistics = Statistics(part.statistics[None], case.loss, (1, 6), case.shards.total_counted)
            started = [group.grad_reduce_handle is not None]
            part.backward(statistics, case.weights, True)
            started.append(group.grad_reduce_handle is not None)
            embedding.backward(case.labels, case.hidden.transpose(0, 1))
            started.append(group.grad_reduce_handle is not None)
        model.finish_grad_sync()
    dense = 2 * case.dense()[2]
    looked_up = torch.zeros_like(dense).index_add_(0, case.labels.t().flatten(), 2 * case.hidden.flatten(0, 1).double())
    rows = case.stock_rows
    weights: tuple[Any, Any] = embedding.weight, output.weight
    expected = (dense + looked_up, dense + looked_up) if tied else (looked_up, dense)
    errors = [(one.main_grad[:rows] - value).abs().max().item() for one, value in zip(weights, expected, strict=True)]
    return started, max(errors)


@pytest.mark.parametrize("tied", [False, True])
def test_reduction_starts_after_the_last_pass(pool: Pool, tied: bool) -> None:
    for started, error in pool.run(2, readiness, tied):
        assert started == [False, False, True]
        assert error < 1e-5
