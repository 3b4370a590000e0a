"""Every flag, by group: the new ones of the pipeline schedules, then Megatron-LM's with its names, defaults and meanings."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any

from megatron.pipeline.flags.flag_types import (
    layer_pattern,
    memory_size,
    minutes,
    not_negative,
    pass_seconds,
    positive_float,
    positive_int,
    probability,
    share_below_one,
    whole,
)
from megatron.pipeline.schedule.core.names import OFF, STOCK

PROFILE = "profile"  # in place of a file of costs: they are measured in this run
# The flags that set the number of chunks per rank, or the layers of each chunk.
CHUNK_FLAGS = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout")
TOKENIZERS = (
    "ByteLevelTokenizer",
    "NullTokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "TikTokenizer",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all groups of flags to a parser."""
    add_new_flags(parser)
    _add(parser, _MEGATRON)


def add_new_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that Megatron-LM does not have to a parser that has Megatron-LM's own."""
    _add(parser, _NEW)


class Role(Enum):
    """What a flag decides, for programs that put aside a user's flags of one kind: see ``neutral``."""

    CHUNKS = auto()  # chunks per rank
    LAYOUT = auto()  # how ranks share the model, its gradients and its optimizer
    SCHEDULE = auto()  # the pipeline schedule and its transformations
    DETAILS = auto()  # how --vocab-parallel and --offload work
    MEMORY = auto()  # recomputation
    FILES = auto()  # what is read at the start and written on the way
    LENGTH = auto()  # iterations, and what changes over them
    DATA = auto()  # the training data


def neutral(*roles: Role) -> dict[str, Any]:
    """The values with which the flags of some roles do nothing, by name: their defaults, and megatron-core's own schedule."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    values = {action.dest: action.default for action in parser._actions if vars(action).get("role") in roles}
    return values | ({"pipeline_schedule": STOCK} if Role.SCHEDULE in roles else {})


def flag_of(name: str) -> str:
    """The flag that sets a name, such as ``--num-layers`` for ``num_layers``."""
    return f"--{name.replace('_', '-')}"


def _adder(group: argparse._ArgumentGroup, role: Role) -> Callable[..., None]:
    """``group.add_argument`` for flags of a role."""

    def add(*names: str, **options: Any) -> None:
        vars(group.add_argument(*names, **options))["role"] = role

    return add


def _add(parser: argparse.ArgumentParser, groups: Mapping[str, Callable[[argparse._ArgumentGroup], None]]) -> None:
    for title, add_group in groups.items():
        add_group(parser.add_argument_group(title))


def _schedule(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    schedule, file = _adder(group, Role.SCHEDULE), _adder(group, Role.FILES)
    add("--config", metavar="FILE", help="YAML file of flags without the dashes; flags on the command line win")
    schedule("--pipeline-schedule", default="zb-h1", metavar="NAME", help="a family, file:PATH, or stock for megatron-core's own")
    schedule("--pipeline-memory-limit", metavar="X", help="activation memory per rank; 1.0 is 1F1B's peak; or bytes: 12GiB")
    schedule("--pipeline-costs", metavar="FILE", help="plan with this JSON file of every pass's seconds and bytes; or profile: "
        "measure them in the first iterations, and plan again while training goes on")  # fmt: skip
    file("--pipeline-costs-cache", metavar="FILE", help="file for the costs that --pipeline-costs profile measures; "
        "pipeline_costs.json in the directory of --save, else of --pipeline-trace, if not given")  # fmt: skip
    add("--pipeline-timeout", type=pass_seconds, metavar="SECONDS",
        help="end all ranks when no pass ends for this long; 300, or half the distributed timeout if less")  # fmt: skip
    add("--pipeline-p2p", choices=["single", "batched"], default="single",
        help="start the sends and receives between two passes one by one, or together")  # fmt: skip
    file("--pipeline-trace", metavar="DIR", help="write the measured timeline of every logged iteration here")
    schedule("--recompute-fused-backward", action="store_true",
        help="B also computes the weight gradients of what it recomputes: less memory, but less W to fill gaps")  # fmt: skip
    file("--metrics", metavar="FILE", help="append one JSON object per iteration here")


def _vocabulary(group: argparse._ArgumentGroup) -> None:
    schedule, detail = _adder(group, Role.SCHEDULE), _adder(group, Role.DETAILS)
    schedule("--vocab-parallel", default=OFF, choices=[OFF, "1", "2", "interlaced"],
        help="shard embedding and output layer over all pipeline ranks: with 2 a rank holds one microbatch more, with 1 two "
        "more; with interlaced all ranks stop for them")  # fmt: skip
    schedule("--layer-redistribution", action="store_true",
        help="the stages with embedding and output layer get fewer transformer layers, by as many as these cost")  # fmt: skip
    detail("--vocab-logits-limit", type=memory_size, metavar="SIZE", help="with --vocab-parallel: if a rank's logits take more "
        "in float32 than this, such as 256MiB, compute them in parts, and again for their gradient")  # fmt: skip
    detail("--vocab-mask-padding", action="store_true", help="with --vocab-parallel: leave rows beyond the tokenizer's "
        "vocabulary out of the softmax, in which megatron-core counts its padding")  # fmt: skip
    detail("--label-smoothing", type=share_below_one, default=0.0,
        help="with --vocab-parallel: share of the target that is spread over all tokens")  # fmt: skip
    detail("--z-loss", type=not_negative, default=0.0,
        help="with --vocab-parallel: weight of the softmax denominator's squared logarithm in the loss")  # fmt: skip


def _offload(group: argparse._ArgumentGroup) -> None:
    schedule, detail = _adder(group, Role.SCHEDULE), _adder(group, Role.DETAILS)
    schedule("--offload", default=OFF, choices=[OFF, "selective", "full"], help="copy activations to host memory while ranks "
        "compute: full, all that costs no time; selective, at most half, those that are kept longest")  # fmt: skip
    schedule("--offload-profile", action="store_true", help="measure passes, bytes and copies in the first iterations, and plan "
        "again: --pipeline-costs profile")  # fmt: skip
    schedule("--offload-host-memory", type=memory_size, metavar="SIZE", help="the most host memory per rank, such as 64GiB")
    detail("--offload-min-size", type=memory_size, metavar="SIZE", help="keep smaller tensors on the device; 64KiB if not given")
    detail("--no-offload-numa-binding", action="store_false", dest="offload_numa_binding",
        help="leave every rank on all CPUs, instead of those next to its GPU")  # fmt: skip
    schedule("--offload-cpu-bandwidth", type=positive_float, metavar="GB/S",
        help="without a GPU: emulate copies at this speed in each direction")  # fmt: skip


def _steps_ahead(group: argparse._ArgumentGroup) -> None:
    schedule = _adder(group, Role.SCHEDULE)
    schedule("--post-validation", action="store_true",
        help="step before other stages' gradients are known, and roll back if that was wrong: iterations interlock")  # fmt: skip
    schedule("--post-validation-when", choices=["measured", "always"],
        help="only while it is measured to pay (when not given), or from the first step on")  # fmt: skip
    schedule("--post-validation-copy", choices=["device", "host"],
        help="where to keep the copy that a roll-back restores; device when not given")  # fmt: skip


def _model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num-layers", type=positive_int, help="transformer layers")
    add("--hidden-size", type=positive_int, help="width of the residual stream")
    add("--ffn-hidden-size", type=positive_int, help="width of the MLP; 4*hidden, or 8/3*hidden rounded to 64 with --swiglu")
    add("--num-attention-heads", type=positive_int, help="attention heads")
    add("--group-query-attention", action="store_true", help="share keys and values between heads")
    add("--num-query-groups", type=positive_int, default=1, help="key/value heads with --group-query-attention")
    add("--kv-channels", type=positive_int, help="width of a head; hidden/heads when not given")
    add("--seq-length", type=positive_int, help="tokens of a sample")
    add("--max-position-embeddings", type=positive_int, help="longest sequence; --seq-length when not given")
    add("--position-embedding-type", default="learned_absolute", choices=["learned_absolute", "rope", "none"], help="positions")
    add("--rotary-base", type=int, default=10000, help="base of the rotary angles")
    add("--rotary-percent", type=probability, default=1.0, help="share of a head's channels that is rotated")
    add("--swiglu", action="store_true", help="gated SiLU in the MLP instead of GELU")
    add("--squared-relu", action="store_true", help="squared ReLU in the MLP instead of GELU")
    add("--normalization", default="LayerNorm", choices=["LayerNorm", "RMSNorm"], help="kind of normalisation")
    add("--norm-epsilon", type=not_negative, default=1e-5, dest="layernorm_epsilon", help="epsilon of the normalisation")
    add("--qk-layernorm", action="store_true", help="normalise queries and keys")
    add("--disable-bias-linear", action="store_false", dest="add_bias_linear", help="no biases in the linear layers")
    add("--add-qkv-bias", action="store_true", help="biases in the QKV projection even so")
    add("--untie-embeddings-and-output-weights", action="store_true", help="separate weights for embedding and output layer")
    add("--make-vocab-size-divisible-by", type=positive_int, default=128, help="pad the vocabulary to a multiple of this")
    add("--mtp-num-layers", type=positive_int, help="multi-token prediction layers: each predicts one token further")
    add(
        "--mtp-loss-scaling-factor",
        type=positive_float,
        default=0.1,
        help="weight of the losses of the multi-token prediction layers",
    )
    add("--init-method-std", type=not_negative, default=0.02, help="standard deviation of the initial weights")
    add("--attention-dropout", type=probability, default=0.1, help="dropout of attention probabilities")
    add("--hidden-dropout", type=probability, default=0.1, help="dropout of hidden states")
    add("--use-mcore-models", action="store_true", help="always on, as in Megatron-LM, where the flag remains")
    add(
        "--transformer-impl",
        choices=["local", "transformer_engine"],
        help="transformer_engine where it is installed, else local",
    )
    add("--use-cpu-initialization", action="store_true", help="draw initial weights on the CPU")
    add("--seed", type=whole, default=1234, help="seed of weights, dropout and data order")


def _parallel(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    chunks = _adder(group, Role.CHUNKS)
    layout = _adder(group, Role.LAYOUT)
    layout("--tensor-model-parallel-size", type=positive_int, default=1, help="ranks that share each layer")
    layout("--pipeline-model-parallel-size", type=positive_int, default=1, help="ranks that share the layers' sequence")
    layout("--context-parallel-size", type=positive_int, default=1, help="ranks that share each sequence")
    layout("--sequence-parallel", action="store_true", help="cut norms and dropout along the sequence over the tensor ranks")
    chunks("--num-layers-per-virtual-pipeline-stage", type=positive_int, help="layers of one chunk; sets the chunks per rank")
    chunks("--num-virtual-stages-per-pipeline-rank", type=positive_int, help="chunks per rank")
    chunks(
        "--pipeline-model-parallel-layout",
        metavar="STAGES",
        help="the layers of every stage, in the model's order, such as 'Ett|(tt|)*2tL'",
    )
    layout(
        "--num-layers-in-first-pipeline-stage",
        "--decoder-first-pipeline-num-layers",
        dest="decoder_first_pipeline_num_layers",
        type=positive_int,
        help="layers of the model's first stage; the others share the rest",
    )
    layout(
        "--num-layers-in-last-pipeline-stage",
        "--decoder-last-pipeline-num-layers",
        dest="decoder_last_pipeline_num_layers",
        type=positive_int,
        help="layers of the model's last stage; the others share the rest",
    )
    layout(
        "--account-for-embedding-in-pipeline-split",
        action="store_true",
        help="the embedding counts as a layer when layers are spread over stages",
    )
    layout(
        "--account-for-loss-in-pipeline-split",
        action="store_true",
        help="the output layer counts as a layer when layers are spread over stages",
    )
    layout("--use-distributed-optimizer", action="store_true", help="cut the optimizer state over the data-parallel ranks")
    layout("--overlap-grad-reduce", action="store_true", help="reduce gradients while the backward runs")
    layout("--overlap-param-gather", action="store_true", help="gather parameters while the forward runs")
    add("--ddp-bucket-size", type=positive_int, help="parameters of one gradient bucket")
    add("--distributed-backend", choices=["nccl", "gloo"], help="nccl with a GPU, gloo without")
    add("--distributed-timeout-minutes", type=minutes, default=10, help="longest wait of a collective")


def _experts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    layout = _adder(group, Role.LAYOUT)
    balancing = ["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]
    add("--num-experts", type=positive_int, help="experts of a layer, which replace its MLP")
    layout("--expert-model-parallel-size", type=positive_int, default=1, help="ranks that share the experts of a layer")
    layout(
        "--expert-tensor-parallel-size",
        type=positive_int,
        help="ranks that share each expert; --tensor-model-parallel-size when not given",
    )
    add(
        "--moe-layer-freq",
        type=layer_pattern,
        default=1,
        metavar="N",
        help="experts in every Nth layer, or a list with 1 (experts) or 0 for every layer: '([0]+[1]*3)*2'",
    )
    add("--moe-ffn-hidden-size", type=positive_int, help="width of an expert; --ffn-hidden-size when not given")
    add("--moe-shared-expert-intermediate-size", type=positive_int, help="width of the experts that see every token")
    add("--moe-grouped-gemm", action="store_true", help="all experts of a rank in one product")
    add("--moe-router-topk", type=positive_int, default=2, help="experts of a token")
    add("--moe-router-score-function", default="softmax", choices=["softmax", "sigmoid"], help="score of an expert")
    add("--moe-router-pre-softmax", action="store_true", help="softmax over all experts, before the choice")
    add("--moe-router-dtype", choices=["fp32", "fp64"], help="precision of the router; the model's when not given")
    add("--moe-router-num-groups", type=positive_int, help="groups of experts for --moe-router-group-topk")
    add("--moe-router-group-topk", type=positive_int, help="groups of experts that a token may choose from")
    add("--moe-router-topk-scaling-factor", type=positive_float, help="factor of the chosen scores")
    add(
        "--moe-router-load-balancing-type",
        nargs="+",
        default=["aux_loss"],
        choices=balancing,
        help="how tokens are spread over experts; several auxiliary losses add up",
    )
    add("--moe-aux-loss-coeff", nargs="+", type=not_negative, default=[0.0], help="weight of each auxiliary loss")
    add("--moe-z-loss-coeff", type=positive_float, help="weight of the loss that keeps the router's logits small")
    add("--moe-router-enable-expert-bias", action="store_true", help="balance by a bias that follows the experts' load")
    add("--moe-router-bias-update-rate", type=positive_float, default=1e-3, help="change of that bias per iteration")
    add("--moe-token-dispatcher-type", default="allgather", choices=["allgather", "alltoall"], help="how tokens travel")
    add("--moe-expert-capacity-factor", type=positive_float, help="tokens of an expert over their mean; others are dropped")
    add("--moe-pad-expert-input-to-capacity", action="store_true", help="pad the tokens of every expert to its capacity")
    add("--moe-token-drop-policy", default="probs", choices=["probs", "position"], help="which tokens are dropped")


def _batch(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    length = _adder(group, Role.LENGTH)
    add("--micro-batch-size", type=positive_int, help="samples of one microbatch on one data-parallel rank")
    add(
        "--global-batch-size",
        type=positive_int,
        help="samples of one iteration; micro batch times data-parallel size if not given",
    )
    length(
        "--rampup-batch-size",
        nargs=3,
        type=positive_int,
        metavar=("START", "STEP", "SAMPLES"),
        help="grow the batch from START",
    )
    length("--train-iters", type=positive_int, help="iterations of the whole training")
    add("--calculate-per-token-loss", action="store_true", help="average over all tokens instead of over microbatches")


def _optimizer(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--optimizer", default="adam", choices=["adam", "sgd"], help="optimizer")
    add("--adam-beta1", type=probability, default=0.9, help="decay of the first moment")
    add("--adam-beta2", type=probability, default=0.999, help="decay of the second moment")
    add("--adam-eps", type=not_negative, default=1e-8, help="epsilon of Adam")
    add("--sgd-momentum", type=probability, default=0.9, help="momentum of SGD")
    add("--weight-decay", type=not_negative, default=0.01, help="weight decay")
    add("--start-weight-decay", type=not_negative, help="weight decay at the start, when it grows")
    add("--end-weight-decay", type=not_negative, help="weight decay at the end, when it grows")
    add("--weight-decay-incr-style", default="constant", choices=["constant", "linear", "cosine"], help="how it grows")
    add("--clip-grad", type=not_negative, default=1.0, help="largest gradient norm; 0 does not clip")


def _learning_rate(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    length = _adder(group, Role.LENGTH)
    styles = ["constant", "linear", "cosine", "inverse-square-root", "WSD"]
    add("--lr", type=positive_float, help="largest learning rate")
    add("--min-lr", type=not_negative, default=0.0, help="smallest learning rate after the warm-up")
    add("--lr-decay-style", default="linear", choices=styles, help="how it falls")
    length("--lr-decay-iters", type=positive_int, help="iterations until --min-lr; --train-iters when not given")
    add(
        "--lr-wsd-decay-style",
        default="exponential",
        choices=["exponential", "linear", "cosine", "minus_sqrt"],
        help="WSD's fall",
    )
    add("--lr-wsd-decay-iters", type=positive_int, help="iterations of the fall of WSD")
    length("--lr-warmup-iters", type=whole, default=0, help="iterations from --lr-warmup-init to --lr")
    length("--lr-warmup-fraction", type=probability, help="the same as a share of --lr-decay-iters")
    add("--lr-warmup-init", type=not_negative, default=0.0, help="learning rate at the start of the warm-up")
    add(
        "--override-opt_param-scheduler",
        "--override-opt-param-scheduler",
        action="store_true",
        help="when loading, use the flags",
    )
    add("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler", action="store_true",
        help="when loading, use the checkpoint's learning-rate schedule")  # fmt: skip


def _precision(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--bf16", action="store_true", help="bfloat16 weights and activations")
    add("--fp16", action="store_true", help="float16 weights and activations")
    add("--loss-scale", type=positive_float, help="constant loss scale of fp16; dynamic when not given")
    add("--initial-loss-scale", type=positive_float, default=2.0**32, help="first dynamic loss scale")
    add("--min-loss-scale", type=positive_float, default=1.0, help="smallest dynamic loss scale")
    add("--loss-scale-window", type=positive_float, default=1000, help="good iterations before the scale doubles")
    add("--hysteresis", type=positive_int, default=2, help="bad iterations before the scale halves")
    add("--accumulate-allreduce-grads-in-fp32", action="store_true", help="sum and reduce gradients in float32")
    add("--fp16-lm-cross-entropy", action="store_true", help="cross entropy in fp16")
    add("--no-check-for-nan-in-loss-and-grad", action="store_false", dest="check_for_nan_in_loss_and_grad",
        help="go on when the loss or a gradient is not a number")  # fmt: skip


def _recompute(group: argparse._ArgumentGroup) -> None:
    memory = _adder(group, Role.MEMORY)
    memory("--recompute-activations", action="store_true", help="the same as --recompute-granularity selective")
    memory("--recompute-granularity", choices=["full", "selective"], help="whole layers, or --recompute-modules")
    memory("--recompute-method", choices=["uniform", "block"], help="which layers, with --recompute-granularity full")
    memory("--recompute-num-layers", type=positive_int, help="layers per unit (uniform) or per chunk (block)")
    modules = ["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]
    memory("--recompute-modules", nargs="*", choices=modules, help="what --recompute-granularity selective covers; core_attn")


def _fusions(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--no-masked-softmax-fusion", action="store_false", dest="masked_softmax_fusion", help="plain masked softmax")
    add("--no-bias-gelu-fusion", action="store_false", dest="bias_gelu_fusion", help="plain bias and GELU")
    add("--no-bias-swiglu-fusion", action="store_false", dest="bias_swiglu_fusion", help="plain bias and SwiGLU")
    add("--no-bias-dropout-fusion", action="store_false", dest="bias_dropout_fusion", help="plain bias and dropout")
    add("--no-rope-fusion", action="store_false", dest="apply_rope_fusion", help="plain rotary embedding")
    add("--no-persist-layer-norm", action="store_true", help="plain layer norm")
    add("--no-gradient-accumulation-fusion", action="store_false", dest="gradient_accumulation_fusion",
        help="weight gradients into a temporary first")  # fmt: skip


def _data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    file = _adder(group, Role.FILES)
    data = _adder(group, Role.DATA)
    data("--data-path", nargs="*", metavar="PREFIX", help="data without .bin/.idx; several mix, with weights as in 0.3 A 0.7 B")
    add("--split", help="shares of training, validation and test; 969,30,1 when not given")
    data("--train-data-path", nargs="*", metavar="PREFIX", help="training data, instead of --data-path")
    data("--valid-data-path", nargs="*", metavar="PREFIX", help="validation data, instead of --data-path")
    data("--test-data-path", nargs="*", metavar="PREFIX", help="test data, instead of --data-path")
    add("--mock-data", action="store_true", help="synthetic tokens")
    file("--data-cache-path", metavar="DIR", help="directory for the sample orders; that of the data when not given")
    add("--num-workers", type=whole, default=2, help="processes that read data on each rank; 0 reads in the trainer")
    add("--tokenizer-type", choices=TOKENIZERS, help="tokenizer")
    add("--tokenizer-model", metavar="PATH", help="file or directory of the tokenizer")
    add("--vocab-size", type=positive_int, help="vocabulary of NullTokenizer")
    add("--reset-position-ids", action="store_true", help="positions start anew after an end of document")
    add("--reset-attention-mask", action="store_true", help="no attention across an end of document")
    add("--eod-mask-loss", action="store_true", help="no loss on the end of document")


def _evaluation(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    length = _adder(group, Role.LENGTH)
    add("--eval-interval", type=positive_int, default=1000, help="iterations between evaluations")
    length("--eval-iters", type=whole, default=100, help="iterations of one evaluation; 0 for no evaluation")


def _logging(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    file = _adder(group, Role.FILES)
    length = _adder(group, Role.LENGTH)
    length("--log-interval", type=positive_int, default=100, help="iterations between log lines")
    add("--log-throughput", action="store_true", help="log TFLOP/s per GPU")
    add("--timing-log-level", type=int, default=0, choices=[0, 1, 2], help="0 logs no times of parts, 2 all of them")
    add("--timing-log-option", default="minmax", choices=["max", "minmax", "all"], help="which ranks' times")
    file("--tensorboard-dir", metavar="DIR", help="write a TensorBoard log here")
    add("--tensorboard-log-interval", type=positive_int, default=1, help="iterations between points")


def _checkpoint(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    file = _adder(group, Role.FILES)
    length = _adder(group, Role.LENGTH)
    file("--save", metavar="DIR", help="write checkpoints here: at the end, on SIGTERM, and every --save-interval")
    file("--save-interval", type=positive_int, help="iterations between checkpoints")
    file("--load", metavar="DIR", help="go on from the checkpoint here, of Megatron-LM too; start anew if there is none")
    file("--exit-on-missing-checkpoint", action="store_true", help="end with exit code 2 if --load has no checkpoint")
    add("--ckpt-format", default="torch_dist", choices=["torch_dist"], help="how checkpoints are written")
    add("--no-save-optim", action="store_true", help="do not save the optimizer")
    add("--no-load-optim", action="store_true", help="do not load the optimizer")
    file("--finetune", action="store_true", help="load the weights alone and start at iteration 0")
    length("--exit-interval", type=positive_int, help="save and exit at an iteration that is a multiple of this")
    length("--exit-duration-in-mins", type=positive_float, help="save and exit after this time")


_NEW = {
    "pipeline schedule": _schedule,
    "vocabulary layers": _vocabulary,
    "activations in host memory": _offload,
    "optimizer steps ahead": _steps_ahead,
}
_MEGATRON = {
    "model": _model,
    "parallel sizes": _parallel,
    "mixture of experts": _experts,
    "batch": _batch,
    "optimizer": _optimizer,
    "learning rate": _learning_rate,
    "precision": _precision,
    "recomputation": _recompute,
    "fused kernels": _fusions,
    "data": _data,
    "evaluation": _evaluation,
    "logging": _logging,
    "checkpoints": _checkpoint,
}
