"""The vocabulary in shards within the model: stock's initial weights, checkpoints that stock reads and writes, DDP and TP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool

FLAGS = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1e-2 --seed 7 --micro-batch-size 2 "
    "--global-batch-size 24 --train-iters 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 37 "
    "--make-vocab-size-divisible-by 8 --pipeline-schedule 1f1b"
)
EMBEDDING, OUTPUT, POSITIONS = "embedding.word_embeddings.weight", "output_layer.weight", "embedding.position_embeddings.weight"


def build(flags: str, v: bool = False, gpu_initialization: bool = False) -> tuple[Any, Any]:
    """Flags and everything that they train, without a schedule to do it."""
    from megatron.pipeline import patches

    patches.install()
    from megatron.pipeline.schedule import placement
    from megatron.pipeline.training import config
    from megatron.pipeline.training.arguments import parse
    from megatron.pipeline.training.state import build_training, initialize_model_parallel
    from megatron.pipeline.training.tokenizer import padded_vocab_size
    from megatron.pipeline.training.validation import validate

    args = parse(f"{FLAGS} {flags}".split())
    validate(args, torch.distributed.get_world_size())
    args.padded_vocab_size = padded_vocab_size(args.vocab_size, args)
    ranks = args.pipeline_model_parallel_size
    stages = placement.v(ranks) if v else placement.linear(ranks)
    initialize_model_parallel(args, stages)
    if not gpu_initialization:
        return args, build_training(args, stages)
    from megatron.pipeline.model.gpt import build_model

    settings = config.transformer_config(args, stages)
    settings.use_cpu_initialization = False
    return args, build_model(args, settings, stages)


def initial(flags: str, v: bool = False, gpu_initialization: bool = False) -> dict[str, torch.Tensor]:
    """The whole weights at both ends of the model, on every rank."""
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    _, built = build(flags, v, gpu_initialization)
    found: dict[str, torch.Tensor] = {}
    for chunk in unwrap_model(built if gpu_initialization else built.chunks):
        for name, parameter in chunk.named_parameters():
            if name.startswith(("embedding", "output_layer", "vocabulary")):
                found[name] = parameter.detach()
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


def pass_on(flags: str, v: bool = False) -> list[str]:
    """Load a checkpoint and save it again; without one, take a step with random gradients first. Returns this rank's keys."""
    args, training = build(flags, v)
    from megatron.pipeline.training import checkpoint

    if args.load:
        assert checkpoint.load(args, training)
    else:
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        for chunk in training.chunks:
            for parameter in chunk.parameters():
                gradient = torch.randn(parameter.shape, generator=generator)
                vocabulary = chunk.module.vocabulary if hasattr(chunk.module, "vocabulary") else None
                if vocabulary is not None and parameter.size(0) == vocabulary.shards.rows:
                    gradient[vocabulary.shards.stored(vocabulary.index) :] = 0
                parameter.main_grad.copy_(gradient)
        training.optimizer.step()
    checkpoint.save(args, training)
    return sorted(training.chunks[0].sharded_state_dict(metadata={"dp_cp_group": training.chunks[0].dp_cp_group}))


def contents(directory: str) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its global name."""
    from megatron.pipeline import patches

    patches.install()
    from megatron.core import dist_checkpointing

    found = dist_checkpointing.load_plain_tensors(f"{directory}/iter_0000000")
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (3, ""),
        (2, "--untie-embeddings-and-output-weights --use-distributed-optimizer --bf16"),
        (4, "--untie-embeddings-and-output-weights --bf16"),
    ],
    ids=["tied", "distributed-optimizer", "bf16-empty-shard"],
)
def test_stock_reads_and_writes_the_same_checkpoints(pool: Pool, tmp_path: Path, ranks: int, flags: str) -> None:
    shards = f"{flags} --vocab-parallel 2 --pipeline-model-parallel-size"
    a, b, c = (f"{tmp_path}/{name}" for name in "abc")
    pool.run(ranks, pass_on, f"{shards} {ranks} --save {a}")
    pool.run(2, pass_on, f"{flags} --load {a} --save {b}")  # dense, two data-parallel ranks
    pool.run(4, pass_on, f"{shards} 2 --load {b} --save {c}")
    first, dense, last = (pool.run(1, contents, directory)[0] for directory in (a, b, c))
    assert first.keys() == dense.keys() == last.keys()
    assert first[EMBEDDING].shape == (40, 16) and (OUTPUT in first) == ("untie" in flags)
    assert any("exp_avg" in name and EMBEDDING in name and first[name].any() for name in first)
    for name, tensor in first.items():
        assert torch.equal(tensor, dense[name]) and torch.equal(tensor, last[name]), name
