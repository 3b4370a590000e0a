"""Predicted memory: parameters are those of the real model, and activations those of the closed forms."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import tiny_gpt
from command import refusal
from pool import Pool

from megatron.pipeline.cli import main
from megatron.pipeline.cli.memory import predicted
from megatron.pipeline.model.description import shape_of
from megatron.pipeline.planner.costmodel import activations
from megatron.pipeline.planner.shape.activation_policy import ActivationPolicy
from megatron.pipeline.planner.shape.gpt import Shape

# pp, tp, schedule and flags, on 4 ranks.
UNTIED, EXPERTS = "--untie-embeddings-and-output-weights", "--num-experts 4 --expert-model-parallel-size 2"
MODELS = [
    (4, 1, "1f1b", ""),
    (2, 2, "1f1b", "--group-query-attention --num-query-groups 2 --qk-layernorm --normalization RMSNorm"),
    (2, 2, "zb-v", f"{UNTIED} --swiglu --disable-bias-linear --add-qkv-bias --kv-channels 16"),
    (4, 1, "interleaved", "--num-layers 8 --position-embedding-type rope"),
    (4, 1, "zb-h1", "--vocab-parallel 2"),
    (2, 2, "zb-v", f"{UNTIED} --vocab-parallel 1 --position-embedding-type none"),
    (2, 1, "zb-h1", f"{EXPERTS} --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 48"),
    (
        2,
        2,
        "zb-h1",
        f"{EXPERTS} --moe-layer-freq ([0]+[1])*2 --disable-bias-linear --moe-shared-expert-intermediate-size 24 "
        "--sequence-parallel --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall",
    ),
    (2, 1, "1f1b", f"{UNTIED} --mtp-num-layers 2 --position-embedding-type rope"),
]


def counted(pp: int, tp: int, schedule: str, flags: str) -> tuple[int, int]:
    """Parameters of this rank: those that it has, and those that are predicted."""
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import LayerType

    from megatron.pipeline.model.layout import stage_layers
    from megatron.pipeline.planner.costmodel.parameters import parameters

    run = tiny_gpt.Run(schedule, pp=pp, tp=tp, flags=tuple(flags.split()))
    has = {id(one): one.numel() for chunk in run.chunks for one in chunk.parameters()}
    args, placement = run.args, run.pipeline.placement
    layers = [row.count(LayerType.decoder) for row in stage_layers(args, placement)]
    tied = not args.untie_embeddings_and_output_weights
    predicted = parameters(shape_of(args), placement, layers, run.pipeline.plans.vocabulary, tied)
    return sum(has.values()), predicted[parallel_state.get_pipeline_model_parallel_rank()].total


@pytest.mark.parametrize(("pp", "tp", "schedule", "flags"), MODELS, ids=lambda value: str(value).split(" ")[0])
def test_parameters_are_those_of_the_model(pool: Pool, pp: int, tp: int, schedule: str, flags: str) -> None:
    for has, expected in pool.run(4, counted, pp, tp, schedule, flags):
        assert has == expected


def test_closed_forms_of_activations() -> None:
    """Korthikanti et al., table 2: 10 + 24/t of sbh under tensor parallelism, 34/t with sequence parallelism, 5as^2b unfused."""
    given = Shape.plain(4, 1024, 16, 512, 1024, microbatch=2)
    sbh, matrices = given.tokens * given.hidden, 5 * given.heads * given.seq**2 * given.microbatch

    def held(**how: Any) -> float:
        return activations.layer_activation(replace(given, policy=ActivationPolicy(**how)))

    assert held(tensor=4) == (10 + 24 / 4) * sbh
    assert held(tensor=4, sequence_parallel=True) == held(tensor=2, sequence_parallel=True, context=2) == 34 / 4 * sbh
    assert held(attention_matrices=True) == 34 * sbh + matrices
    assert held(tensor=4, attention_matrices=True) == (10 + 24 / 4) * sbh + matrices / 4
    assert held(attention_matrices=True, wide_softmax=True) == 34 * sbh + 7 / 5 * matrices
    assert held(attention_matrices=True, attention_masks=False) == 34 * sbh + 2 / 5 * matrices
    assert held(attention_matrices=True, attention_masks=False, wide_softmax=True) == 34 * sbh + 6 / 5 * matrices
    assert held(number=4, hidden_masks=False) == 64 * sbh


@pytest.mark.parametrize(
    ("how", "split", "checkpoint", "activation"),
    [
        ({}, True, 2, 4 * 34),
        ({"recompute_layers": 1}, False, 4 * 2, 3 * 2 + 34),
        ({"recompute_layers": 2}, False, 2 * 2, 2 + 2 * 34),
        ({"recompute_layers": 1}, True, 4 * 2, 3 * 32 + 34),
        ({"recompute_layers": 1, "recompute_first": True}, False, 2 + 3 * 34, 2 + 3 * 34),
        ({"recomputed": frozenset({"mlp"})}, False, 4 * 18, 3 * 18 + 34),
        ({"recomputed": frozenset({"layernorm"})}, True, 4 * 30, 3 * 32 + 34),
        ({"recomputed": frozenset({"layernorm"}), "fused_norms": True}, True, 4 * 34, 3 * 34 + 34),
    ],
)
def test_what_recomputation_leaves(how: dict[str, Any], split: bool, checkpoint: int, activation: int) -> None:
    """In sbh, of a stage of four layers; W needs 32sbh of each."""
    given = replace(Shape.plain(4, 1024, 16, 512, 1024), policy=ActivationPolicy(**how))
    sbh = given.tokens * given.hidden
    held = activations.held_by_stage(given, 4, split)
    assert (held.checkpoint / sbh, held.activation / sbh) == (checkpoint, activation)


SELECTIVE = "--recompute-granularity selective --recompute-modules"
EXPERTS_OF_ENGINE = (
    "--num-experts 4 --moe-grouped-gemm --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 256 "
    "--moe-layer-freq ([0]+[1])*4 --disable-bias-linear --moe-token-dispatcher-type alltoall"
)
NARROW = "--multi-latent-attention --q-lora-rank 256 --kv-lora-rank 128 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64"


@pytest.mark.parametrize(
    ("model", "module", "saved"),
    [
        # Numbers for each token, as a mean over the layers. Norms within linear layers are not made again.
        ("", "layernorm", 0),
        ("--transformer-impl local", "layernorm", 2 * 1024),
        (EXPERTS_OF_ENGINE, "layernorm", 1024 / 2),
        (NARROW, "layernorm", 1024),
        (EXPERTS_OF_ENGINE, "moe_act", 2 * 512 / 2),
        (NARROW, "mla_up_proj", 16 * (96 + 96 + 64)),
    ],
)
def test_what_is_recomputed_by_packages_that_are_not_here_is_predicted(model: str, module: str, saved: float) -> None:
    """Transformer Engine trains with these; a prediction needs none of it, in whichever schedule."""
    for schedule in ("1f1b", "zb-v"):
        flags = [*SMALL.split(), "--bf16", "--pipeline-schedule", schedule, *model.split()]
        without, again = predicted(flags), predicted([*flags, *SELECTIVE.split(), module])
        assert again.args.transformer_impl == ("local" if "local" in model else "transformer_engine")
        shape = shape_of(again.args)
        assert activations.layer_activation(shape) - activations.layer_checkpoint(shape) == 1024 * 2 * saved, "in 16 bits"
        less = sum(one.activations - other.activations for one, other in zip(without.ranks, again.ranks, strict=True))
        assert less > 0 or not saved


SMALL = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 --global-batch-size 16 "
    "--train-iters 1 --lr 1e-4 --pipeline-model-parallel-size 4 --tokenizer-type NullTokenizer --vocab-size 1023"
)


def state(flags: str, replicas: int = 1) -> float:
    """Bytes of weights, gradients and optimizer state for a parameter of rank 1."""
    rank = predicted([*SMALL.split(), "--global-batch-size", str(16 * replicas), *flags.split()], replicas).ranks[1]
    return rank.state / rank.parameters


def test_bytes_of_a_parameter() -> None:
    assert state("") == 16 and state("--bf16") == 18 and state("--fp16") == 16
    assert state("--fp16 --accumulate-allreduce-grads-in-fp32 --post-validation --pipeline-schedule 1f1b") == 18 + 12
    assert state("--bf16 --use-distributed-optimizer", replicas=4) == 6 + 12 / 4
    assert state("--optimizer sgd --sgd-momentum 0") == 8


def test_fewer_bytes_where_memory_is_saved() -> None:
    """The schedule that is planned is the one that is counted."""

    def held(flags: str) -> float:
        return max(rank.activations for rank in predicted([*SMALL.split(), "--bf16", *flags.split()]).ranks)

    stock = held("--pipeline-schedule stock")
    assert held("--pipeline-schedule 1f1b") == stock
    assert held("--pipeline-schedule v-half") < 0.8 * stock
    assert held("--pipeline-schedule 1f1b --offload full") < 0.8 * stock
    whole = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert held(f"--pipeline-schedule 1f1b {whole}") < 0.4 * stock
    assert held(f"--pipeline-schedule zb-h2 {whole} --recompute-fused-backward") < 0.5 * held(
        f"--pipeline-schedule zb-h2 {whole}"
    )


def test_what_does_not_fit_is_told_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    """And the files of a training are neither read nor written."""
    flags = f"memory {SMALL} --bf16 --micro-batch-size 16 --global-batch-size 256 --gpu-memory 7 --save no --data-path no"
    assert main([*flags.split(), "--pipeline-schedule", "zb-h1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert not told["fits"] and told["peak_bytes"] > told["gpu_memory"] == 7 * 2**30
    a_message = told["message_bytes"] / told["message_buffers"]
    assert a_message == 16 * 2 * 1024 * 1024 and told["baseline"]["message_buffers"] is None
    assert told["remedies"] and all(remedy["bytes"] <= told["gpu_memory"] for remedy in told["remedies"])
    remedy = told["remedies"][0]
    assert main([*flags.split(), "--pipeline-schedule", "zb-h1", *remedy["flags"].split()]) == 0
    text = capsys.readouterr().out
    assert f"fits into 7 GB: the fullest rank needs {remedy['bytes'] / 2**30:.1f} GiB" in text
    assert main([*flags.split(), "--pipeline-schedule", "zb-h1"]) == 0
    text = capsys.readouterr().out
    verdict = f"does not fit into 7 GB: the fullest rank needs {told['peak_bytes'] / 2**30:.1f} GiB. What would fit"
    assert verdict in text and f" {remedy['flags']}\n" in text


def test_what_fits_barely_is_not_said_to_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """A prediction may be off by the 5 % that mpipe tune leaves as well."""
    flags = [*SMALL.split(), "--bf16", "--pipeline-schedule", "1f1b"]
    needed = predicted(flags).fullest.total / 2**30
    for memory, verdict in (
        (needed / 0.94, f"fits into {needed / 0.94:.3f} GB: the fullest rank needs {needed:.1f} GiB"),
        (needed / 0.96, f"may not fit into {needed / 0.96:.3f} GB: the fullest rank needs {needed:.1f} GiB, more than 95%, and"),
    ):
        assert main(["memory", *flags, "--gpu-memory", f"{memory:.3f}"]) == 0
        assert verdict in capsys.readouterr().out
    assert main(["memory", *flags, "--gpu-memory", f"{needed / 0.96:.3f}", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert not told["fits"] and all(remedy["bytes"] <= 0.95 * told["gpu_memory"] for remedy in told["remedies"])


def test_what_is_assumed_of_attention_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """With what the other kind of layers needs, which is what is predicted for them."""
    flags = [*f"memory {SMALL} --global-batch-size 16 --bf16 --pipeline-schedule zb-h1".split()]
    assert main(flags) == 0
    text = capsys.readouterr().out
    assert "state GiB  activations GiB" in text and "for comparison, stock: megatron-core's own 1F1B, not interleaved\n" in text
    needed = re.search(r"^assumes Transformer Engine, .* with --transformer-impl local .* needs (\d+\.\d) GiB$", text, re.M)
    assert needed, text
    assert main([*flags, "--transformer-impl", "local"]) == 0
    text = capsys.readouterr().out
    assert "assumes" not in text and f"the fullest rank needs {needed[1]} GiB" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-layers 3", "--num-layers 3 cannot be split over 4"),
        ("--nothing", "unknown flag --nothing"),
        ("--config nowhere.yaml", "nowhere.yaml"),
        ("--gpu-memory much", "expected a GPU's memory such as 80 or 80GB, got 'much'"),
        ("--world-size 6", "6 ranks cannot be split into models of 1 x 4 x 1 = 4 ranks"),
        ("--world-size 4 --data-parallel-size 1", "not allowed with argument"),
        ("--pipeline-model-parallel-size 100000", "expected a whole number from 1 to 10,000, got 100000"),
        ("--pipeline-schedule nothing", "unknown schedule 'nothing'"),
    ],
)
def test_bad_input_is_one_line(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(capsys, "memory", SMALL, flags)


def test_layouts_of_virtual_stages_are_predicted() -> None:
    for schedule in ("stock", "zb-v"):
        flags = f"--pipeline-schedule {schedule} --pipeline-model-parallel-layout Ett|t|t|t|t|t||tL"
        both = predicted([*SMALL.split(), *flags.split(), "--num-virtual-stages-per-pipeline-rank", "2"])
        assert both.layers == [2, 1, 1, 1, 1, 1, 0, 1] and both.ranks == predicted([*SMALL.split(), *flags.split()]).ranks


def test_many_microbatches_are_planned_as_few(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for samples in (64, 100_000):
        flags = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --vocab-size 100 "
        flags += f"--pipeline-model-parallel-size 4 --pipeline-schedule zb-v --global-batch-size {samples} --train-iters 1 --lr 1"
        assert main(["memory", "--json", *flags.split(), "--tokenizer-type", "NullTokenizer"]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert [found["microbatches"] for found in said] == [64, 100_000]
    assert said[0]["ranks"] == said[1]["ranks"]


def test_groups_of_megatron_cores_own_interleaved_schedule() -> None:
    """Larger groups hold more; without chunks to run them through they mean nothing."""
    sizes = (
        "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --global-batch-size 24 "
        "--lr 1 --train-iters 1 --tokenizer-type NullTokenizer --vocab-size 64 --pipeline-model-parallel-size 4 "
    )
    group = "--microbatch-group-size-per-virtual-pipeline-stage 8 "
    chunks, stock = "--num-virtual-stages-per-pipeline-rank 2 ", "--pipeline-schedule stock "
    held = [
        [rank.microbatches for rank in predicted((sizes + flags).split()).ranks]
        for flags in (stock, stock + group, stock + chunks, stock + chunks + group)
    ]
    assert held[0] == held[1] == [4, 3, 2, 1]
    assert held[2:] == [[(2 * (3 - r) + 4 + 1) / 2 for r in range(4)], [(2 * (3 - r) + 8 + 1) / 2 for r in range(4)]]


def test_the_beginning_of_an_own_flag_is_not_taken_for_one_of_a_training(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["memory", "--gpu", "80"])
    assert "unknown flag --gpu; did you mean --gpu-memory?" in capsys.readouterr().err
