"""The vocabulary in shards within the model: stock's initial weights, checkpoints that stock reads and writes, DDP and TP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from marked import rest
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.utils import unwrap_model
from pool import Pool

from megatron.pipeline.flags import config
from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.validation import validate
from megatron.pipeline.model.build import build_model
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
