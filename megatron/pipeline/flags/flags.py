"""Every flag, by group: the new ones of the pipeline schedules, then Megatron-LM's with its names, defaults and meanings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from enum import Enum
from functools import cache, partial
from typing import Any

from megatron.pipeline.flags.flag_types import (
    at_least_one,
    layer_pattern,
    minutes,
    not_negative,
    positive_float,
    positive_int,
    probability,
    stages,
    to_10_000,
    whole,
    window,
)
from megatron.pipeline.flags.settings import NEW, Role, add_flags, flat
from megatron.pipeline.flags.settings import flag as add
from megatron.pipeline.planner import STOCK, hybrid, topics

# The flags that set the number of chunks per rank, or the layers of each chunk.
CHUNK_FLAGS = topics.CHUNKS[0].details
LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}  # of a stage's parts
_TYPES = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16", "torch.uint8": "fp8"}
GROUP_FLAG = "--microbatch-group-size-per-virtual-pipeline-stage"
TOKENIZERS = ("ByteLevelTokenizer", "NullTokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer", "TikTokenizer")
chunks, layout, schedule, _, memory, files, length, data, predicted = (partial(add, role=role) for role in Role)


def neutral(*roles: Role) -> dict[str, Any]:
    """The values with which the flags of some roles do nothing, by name: their defaults, and megatron-core's own schedule."""
    values = {name: action.default for name, action in actions().items() if vars(action)["role"] in roles}
    return values | ({"pipeline_schedule": STOCK} if Role.SCHEDULE in roles else {})


def given(args: argparse.Namespace, *names: str) -> list[str]:
    """The flags of those names whose values are not the defaults."""
    values = flat(args)
    return [actions()[name].option_strings[0] for name in names if values[name] != actions()[name].default]


@cache
def actions() -> dict[str, argparse.Action]:
    """Meaning of every flag of ``pretrain_gpt.py``, by name, in the order of ``--help``."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser, NEW | MEGATRON)
    return {action.dest: action for action in parser._actions}


def as_flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flags without dashes, as ``--config`` reads them, of values by the names of ``actions``: those that are no defaults."""
    found = {}
    for name, given in values.items():
        action = actions()[name]
        value = _plain(given, action)
        if name != "config" and value not in (None, action.default) and (action.nargs != 0 or value is action.const):
            found[action.option_strings[0][2:]] = True if action.nargs == 0 else value
    return found


def _plain(value: Any, action: argparse.Action) -> Any:
    """A setting as a flag's value."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list | tuple) and action.nargs is None:  # of layers, of a window's sides, or of stages
        rows = ["".join(LETTERS[part] for part in row) for row in value if isinstance(row, list)]
        return "|".join(rows) or (str(value) if isinstance(value, list) else ",".join(map(str, value)))
    if isinstance(value, list):
        return [_plain(each, action) for each in value]
    return _TYPES.get(str(value), value)


# fmt: off
MEGATRON = {
    "model": [
        add("--num-layers", "transformer layers", to_10_000),
        add("--hidden-size", "width of the residual stream", positive_int),
        add("--ffn-hidden-size", "width of the MLP; 4*hidden, or 8/3*hidden rounded to 64 with --swiglu", positive_int),
        add("--num-attention-heads", "attention heads", positive_int),
        add("--group-query-attention", "share keys and values between heads"),
        add("--num-query-groups", "key/value heads with --group-query-attention", positive_int, 1),
        add("--kv-channels", "width of a head; hidden/heads when not given", positive_int),
        add("--seq-length", "tokens of a sample", positive_int),
        add("--max-position-embeddings", "longest sequence; --seq-length when not given", positive_int),
        add("--position-embedding-type", "positions", ["learned_absolute", "rope", "none"], "learned_absolute"),
        add("--rotary-base", "base of the rotary angles", int, 10000),
        add("--rotary-percent", "share of a head's channels that is rotated", probability, 1.0),
        add("--swiglu", "gated SiLU in the MLP instead of GELU"),
        add("--squared-relu", "squared ReLU in the MLP instead of GELU"),
        add("--normalization", "kind of normalisation", ["LayerNorm", "RMSNorm"], "LayerNorm"),
        add("--norm-epsilon", "epsilon of the normalisation", not_negative, 1e-5, dest="layernorm_epsilon"),
        add("--qk-layernorm", "normalise queries and keys"),
        add("--disable-bias-linear", "no biases in the linear layers", clears="add_bias_linear"),
        add("--add-qkv-bias", "biases in the QKV projection, also with --disable-bias-linear"),
        add("--untie-embeddings-and-output-weights", "separate weights for embedding and output layer"),
        add("--make-vocab-size-divisible-by", "pad the vocabulary to a multiple of this", positive_int, 128),
        add("--mtp-num-layers", "multi-token prediction layers: each predicts one token further", to_10_000),
        add("--mtp-loss-scaling-factor", "weight of the losses of the multi-token prediction layers", positive_float, 0.1),
        # Not of Megatron-LM.
        predicted("--trained", "what trains: all, none, layers=16-31 (from 0) or lora:r=16[,linear_qkv,..][,layers=..]",
            str, "all", metavar="WHAT"),
        add("--init-method-std", "standard deviation of the initial weights", not_negative, 0.02),
        add("--attention-dropout", "dropout of attention probabilities", probability, 0.1),
        add("--hidden-dropout", "dropout of hidden states", probability, 0.1),
        add("--use-mcore-models", "always on, as in Megatron-LM, where the flag remains"),
        add("--transformer-impl", "transformer_engine where it is installed, else local", ["local", "transformer_engine"]),
        add("--use-cpu-initialization", "draw initial weights on the CPU"),
        add("--seed", "seed of weights, dropout and data order", whole, 1234),
    ],
    "parallel sizes": [
        layout("--tensor-model-parallel-size", "ranks that share each layer", to_10_000, 1),
        layout("--pipeline-model-parallel-size", "ranks that share the layers' sequence", to_10_000, 1),
        layout("--context-parallel-size", "ranks that share each sequence", to_10_000, 1),
        layout("--sequence-parallel", "cut norms and dropout along the sequence over the tensor ranks"),
        chunks("--num-layers-per-virtual-pipeline-stage", "layers of one chunk; sets the chunks per rank", positive_int),
        chunks("--num-virtual-stages-per-pipeline-rank", "chunks per rank", to_10_000),
        chunks("--pipeline-model-parallel-layout",
            "the layers of every stage, in the model's order, such as 'Ett|(tt|)*2tL'", stages, metavar="STAGES"),
        chunks(GROUP_FLAG,
            "microbatches that run through a chunk before the next one's turn, for interleaved, gis and stock; as many as "
            "pipeline ranks if not given", positive_int, dest="microbatch_group_size_per_vp_stage", metavar="N"),
        layout("--num-layers-in-first-pipeline-stage --decoder-first-pipeline-num-layers",
            "layers of the model's first stage; the others share the rest",
            positive_int, dest="decoder_first_pipeline_num_layers"),
        layout("--num-layers-in-last-pipeline-stage --decoder-last-pipeline-num-layers",
            "layers of the model's last stage; the others share the rest", positive_int, dest="decoder_last_pipeline_num_layers"),
        layout("--account-for-embedding-in-pipeline-split", "the embedding counts as a layer when layers are spread over stages"),
        layout("--account-for-loss-in-pipeline-split", "the output layer counts as a layer when layers are spread over stages"),
        layout("--use-distributed-optimizer", "cut the optimizer state over the data-parallel ranks"),
        layout("--overlap-grad-reduce", "reduce gradients while the backward runs"),
        layout("--overlap-param-gather", "gather parameters while the forward runs"),
        add("--ddp-bucket-size", "parameters of one gradient bucket", positive_int),
        add("--distributed-backend", "nccl with a GPU, gloo without", ["nccl", "gloo"]),
        add("--distributed-timeout-minutes", "longest wait of a collective", minutes, 10),
    ],
    "multi-latent attention": [
        predicted("--multi-latent-attention", "make queries, and keys and values, from narrow vectors"),
        predicted("--q-lora-rank", "width of what queries are made from; the hidden state when not given", positive_int),
        predicted("--kv-lora-rank", "width of what keys and values are made from", positive_int),
        predicted("--qk-head-dim", "width of a head's query and key without their position", positive_int),
        predicted("--qk-pos-emb-head-dim", "width of their part with the position", positive_int),
        predicted("--v-head-dim", "width of a head's values", positive_int),
    ],
    "hybrid models": [
        predicted("--hybrid-layer-pattern --hybrid-override-pattern",
            "a symbol for every layer: M Mamba-2, * attention, - an MLP, E experts; | between stages, / before MTP's", str),
        predicted("--is-hybrid-model", "in its place, Mamba-2 but for the next flags' shares"),
        predicted("--hybrid-attention-ratio", "share of layers with attention", probability, 0.0),
        predicted("--hybrid-mlp-ratio", "share of layers with an MLP", probability, 0.0),
        predicted("--mamba-state-dim", "numbers of the state for each channel", positive_int, 128),
        predicted("--mamba-head-dim", "width of a head", positive_int, 64),
        predicted("--mamba-num-groups", "groups of heads", positive_int, 8),
        predicted("--mamba-num-heads", "heads; as many as are twice as wide as hidden states if not given", positive_int),
    ],
    "other attention": [
        predicted("--experimental-attention-variant", "in place of attention: gated delta nets in the layers that the next flag "
            "says; or attention to the keys that an indexer chooses, in all", [hybrid.LINEAR, hybrid.SPARSE]),
        predicted("--linear-attention-freq", "attention in every Nth layer, or a list with 1 (these nets) or 0", layer_pattern),
        predicted("--linear-conv-kernel-dim", "tokens of the convolution", positive_int, 4),
        predicted("--linear-key-head-dim", "width of a head's queries and keys", positive_int, 128),
        predicted("--linear-value-head-dim", "width of a head's values", positive_int, 128),
        predicted("--linear-num-key-heads", "heads of queries and keys", positive_int, 16),
        predicted("--linear-num-value-heads", "heads of values", positive_int, 32),
        predicted("--dsa-indexer-n-heads", "heads of the indexer", positive_int),
        predicted("--dsa-indexer-head-dim", "their width", positive_int),
        predicted("--dsa-indexer-topk", "keys that attention reads", positive_int),
        predicted("--attention-output-gate", "a gate for attention's output"),
    ],
    "kernels": [
        predicted("--window-size", "keys before and behind its own that a token reads, such as 128,0; -1 for all", window),
        predicted("--window-attn-skip-freq", "all keys in every Nth layer, or a list with 1 (window) or 0", layer_pattern),
        predicted("--attention-backend", "kernels of attention", ["auto", "flash", "fused", "unfused", "local"], "auto"),
        predicted("--softmax-type", "attention sinks: learnable has a number for each head",
            ["vanilla", "off-by-one", "learnable"], "vanilla"),
        predicted("--attention-softmax-in-fp32", "softmax in float32; no bytes, where attention is fused"),
        predicted("--cross-entropy-loss-fusion", "cross entropy in one kernel"),
        predicted("--cross-entropy-fusion-impl", "whose", ["native", "te"], "native"),
        predicted("--defer-embedding-wgrad-compute", "the output layer's weight gradients after all backwards"),
        predicted("--wgrad-deferral-limit", "for this number of microbatches; 0 for all", whole, 0),
        predicted("--cuda-graph-impl", "CUDA graphs",
            ["none", "local", "transformer_engine", "full_iteration"], "none"),
        predicted("--cuda-graph-scope --cuda-graph-modules", "which: attn, moe_router, moe, full_iteration, ...", str, nargs="+"),
        predicted("--grad-reduce-in-bf16", "gradients in bfloat16"),
        predicted("--fine-grained-activation-offloading", "activations in host memory, by module"),
        predicted("--offload-modules", "which: attn_norm, qkv_linear, core_attn, attn_proj, expert_fc1, ...", str, nargs="+"),
    ],
    "mixture of experts": [
        add("--num-experts", "experts of a layer, which replace its MLP", to_10_000),
        layout("--expert-model-parallel-size", "ranks that share the experts of a layer", to_10_000, 1),
        layout("--expert-tensor-parallel-size",
            "ranks that share each expert; --tensor-model-parallel-size when not given", to_10_000),
        add("--moe-layer-freq", "experts in every Nth layer, or a list with 1 (experts) or 0 for every layer: '([0]+[1]*3)*2'",
            layer_pattern, 1, metavar="N"),
        add("--moe-ffn-hidden-size", "width of an expert; --ffn-hidden-size when not given", positive_int),
        add("--moe-shared-expert-intermediate-size", "width of the experts that see every token", positive_int),
        predicted("--moe-latent-size", "width of tokens that visit experts; hidden states' if not given", positive_int),
        predicted("--moe-shared-expert-overlap", "these beside the exchange of the other experts' tokens"),
        # Not of Megatron-LM, whose routers decide.
        predicted("--moe-load-factor", "tokens of the rank with most, over the mean", at_least_one, 1.0),
        add("--moe-grouped-gemm", "all experts of a rank in one product"),
        add("--moe-router-topk", "experts per token", positive_int, 2),
        add("--moe-router-score-function", "score of an expert", ["softmax", "sigmoid"], "softmax"),
        add("--moe-router-pre-softmax", "softmax over all experts, before the choice"),
        add("--moe-router-dtype", "precision of the router; the model's when not given", ["fp32", "fp64"]),
        add("--moe-router-num-groups", "groups of experts for --moe-router-group-topk", positive_int),
        add("--moe-router-group-topk", "groups of experts that a token may choose from", positive_int),
        add("--moe-router-topk-scaling-factor", "factor of the chosen scores", positive_float),
        add("--moe-router-load-balancing-type", "how tokens are spread over experts; several auxiliary losses add up",
            ["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"], ["aux_loss"], nargs="+"),
        add("--moe-aux-loss-coeff", "weight of each auxiliary loss", not_negative, [0.0], nargs="+"),
        add("--moe-z-loss-coeff", "weight of the loss that keeps the router's logits small", not_negative),
        add("--moe-router-enable-expert-bias", "balance by a bias that follows the experts' load"),
        add("--moe-router-bias-update-rate", "change of that bias per iteration", not_negative, 1e-3),
        add("--moe-token-dispatcher-type", "how tokens are dispatched to experts; flex: DeepEP or HybridEP, in predictions alone",
            ["allgather", "alltoall", "flex"], "allgather"),
        schedule("--overlap-moe-expert-parallel-comm", "all-to-alls of experts behind another microbatch's layers"),
        add("--moe-expert-capacity-factor", "tokens of an expert over their mean; others are dropped", positive_float),
        add("--moe-pad-expert-input-to-capacity", "pad the tokens of every expert to its capacity"),
        add("--moe-token-drop-policy", "which tokens are dropped", ["probs", "position"], "probs"),
    ],
    "batch": [
        add("--micro-batch-size", "samples of one microbatch on one data-parallel rank", positive_int),
        add("--global-batch-size", "samples of one iteration; micro batch times data-parallel size if not given", positive_int),
        length("--rampup-batch-size", "grow the batch from START", positive_int, nargs=3, metavar=("START", "STEP", "SAMPLES")),
        length("--train-iters", "iterations of the whole training", positive_int),
        add("--calculate-per-token-loss", "average over all tokens instead of over microbatches"),
    ],
    "optimizer": [
        add("--optimizer", "optimizer", ["adam", "sgd"], "adam"),
        add("--adam-beta1", "decay of the first moment", probability, 0.9),
        add("--adam-beta2", "decay of the second moment", probability, 0.999),
        add("--adam-eps", "epsilon of Adam", not_negative, 1e-8),
        add("--sgd-momentum", "momentum of SGD", probability, 0.9),
        add("--weight-decay", "weight decay", not_negative, 0.01),
        add("--start-weight-decay", "weight decay at the start, when it grows", not_negative),
        add("--end-weight-decay", "weight decay at the end, when it grows", not_negative),
        add("--weight-decay-incr-style", "how weight decay grows", ["constant", "linear", "cosine"], "constant"),
        add("--clip-grad", "largest gradient norm; 0 does not clip", not_negative, 1.0),
        predicted("--use-precision-aware-optimizer", "the optimizer's numbers in the next flags' precisions"),
        # Other names than Megatron-LM's: megatron-core wants torch's types by these, and only predictions read words.
        predicted("--main-grads-dtype", "its gradients", ["fp32", "bf16"], "fp32", dest="main_grads"),
        predicted("--main-params-dtype", "its copy of the weights", ["fp32", "fp16"], "fp32", dest="main_params"),
        predicted("--exp-avg-dtype", "Adam's first moment", ["fp32", "fp16", "bf16", "fp8"], "fp32", dest="exp_avg"),
        predicted("--exp-avg-sq-dtype", "Adam's second moment", ["fp32", "fp16", "bf16", "fp8"], "fp32", dest="exp_avg_sq"),
        predicted("--optimizer-cpu-offload", "the optimizer's numbers in host memory"),
        predicted("--optimizer-offload-fraction", "share of them there", probability, 1.0),
    ],
    "learning rate": [
        add("--lr", "largest learning rate", positive_float),
        add("--min-lr", "smallest learning rate after the warm-up", not_negative, 0.0),
        add("--lr-decay-style", "how the rate falls", ["constant", "linear", "cosine", "inverse-square-root", "WSD"], "linear"),
        length("--lr-decay-iters", "iterations until --min-lr; --train-iters when not given", positive_int),
        add("--lr-wsd-decay-style", "WSD's fall", ["exponential", "linear", "cosine", "minus_sqrt"], "exponential"),
        add("--lr-wsd-decay-iters", "iterations of the fall of WSD", positive_int),
        length("--lr-warmup-iters", "iterations from --lr-warmup-init to --lr", whole, 0),
        length("--lr-warmup-fraction", "the same as a share of --lr-decay-iters", probability),
        add("--lr-warmup-init", "learning rate at the start of the warm-up", not_negative, 0.0),
        add("--override-opt_param-scheduler --override-opt-param-scheduler", "when loading, use the flags"),
        add("--use-checkpoint-opt_param-scheduler --use-checkpoint-opt-param-scheduler",
            "when loading, use the checkpoint's learning-rate schedule"),
    ],
    "precision": [
        add("--bf16", "bfloat16 weights and activations"),
        add("--fp16", "float16 weights and activations"),
        add("--loss-scale", "constant loss scale of fp16; dynamic when not given", positive_float),
        add("--initial-loss-scale", "first dynamic loss scale", positive_float, 2.0**32),
        add("--min-loss-scale", "smallest dynamic loss scale", positive_float, 1.0),
        add("--loss-scale-window", "good iterations before the scale doubles", positive_float, 1000),
        add("--hysteresis", "bad iterations before the scale halves", positive_int, 2),
        add("--accumulate-allreduce-grads-in-fp32", "sum and reduce gradients in float32"),
        add("--fp16-lm-cross-entropy", "cross entropy in fp16"),
        predicted("--fp8-format", "linears of layers in FP8", ["e4m3", "hybrid"], dest="fp8"),
        predicted("--fp8-recipe", "scales of FP8", ["tensorwise", "delayed", "blockwise", "mxfp8"], "delayed"),
        predicted("--fp8-param-gather", "keep and gather their weights in FP8"),
        predicted("--reuse-grad-buf-for-mxfp8-param-ag", "gather weights of mxfp8 where gradients were"),
        predicted("--fp4-format", "linears of layers in FP4", ["e2m1"], dest="fp4"),
        predicted("--fp4-recipe", "scales of FP4", ["nvfp4"], "nvfp4"),
        predicted("--fp4-param-gather", "keep their weights in FP4"),
        predicted("--first-last-layers-bf16", "first and last layers in bfloat16"),
        predicted("--num-layers-at-start-in-bf16", "how many first ones", whole, 1),
        predicted("--num-layers-at-end-in-bf16", "how many last ones", whole, 1),
        add("--no-check-for-nan-in-loss-and-grad",
            "continue when the loss or a gradient is not a number", clears="check_for_nan_in_loss_and_grad"),
    ],
    "recomputation": [
        memory("--recompute-activations", "the same as --recompute-granularity selective"),
        memory("--recompute-granularity", "whole layers, or --recompute-modules", ["full", "selective"]),
        memory("--recompute-method", "which layers, with --recompute-granularity full", ["uniform", "block"]),
        memory("--recompute-num-layers", "layers per unit (uniform) or per chunk (block)", positive_int),
        memory("--recompute-modules", "what --recompute-granularity selective covers; core_attn",
            ["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"], nargs="*"),
    ],
    "fused kernels": [
        add("--no-masked-softmax-fusion", "plain masked softmax", clears="masked_softmax_fusion"),
        add("--no-bias-gelu-fusion", "plain bias and GELU", clears="bias_gelu_fusion"),
        add("--no-bias-swiglu-fusion", "plain bias and SwiGLU", clears="bias_swiglu_fusion"),
        add("--no-bias-dropout-fusion", "plain bias and dropout", clears="bias_dropout_fusion"),
        add("--no-rope-fusion", "plain rotary embedding", clears="apply_rope_fusion"),
        add("--no-persist-layer-norm", "plain layer norm"),
        add("--no-gradient-accumulation-fusion",
            "weight gradients into a temporary first", clears="gradient_accumulation_fusion"),
    ],
    "data": [
        data("--data-path",
            "data without .bin/.idx; several mix, with weights as in 0.3 A 0.7 B", str, nargs="*", metavar="PREFIX"),
        add("--split", "shares of training, validation and test; 969,30,1 when not given", str),
        data("--train-data-path", "training data, instead of --data-path", str, nargs="*", metavar="PREFIX"),
        data("--valid-data-path", "validation data, instead of --data-path", str, nargs="*", metavar="PREFIX"),
        data("--test-data-path", "test data, instead of --data-path", str, nargs="*", metavar="PREFIX"),
        add("--mock-data", "synthetic tokens"),
        files("--data-cache-path", "directory for the sample orders; that of the data when not given", str, metavar="DIR"),
        add("--num-workers", "processes that read data on each rank; 0 reads in the trainer", whole, 2),
        add("--tokenizer-type", "tokenizer", TOKENIZERS),
        add("--tokenizer-model", "file or directory of the tokenizer", str, metavar="PATH"),
        add("--vocab-size", "vocabulary of NullTokenizer", positive_int),
        add("--reset-position-ids", "positions start anew after an end of document"),
        add("--reset-attention-mask", "no attention across an end of document"),
        add("--eod-mask-loss", "no loss on the end of document"),
    ],
    "evaluation": [
        add("--eval-interval", "iterations between evaluations", positive_int, 1000),
        length("--eval-iters", "iterations of one evaluation; 0 for no evaluation", whole, 100),
    ],
    "logging": [
        length("--log-interval", "iterations between log lines", positive_int, 100),
        add("--log-throughput", "log TFLOP/s per GPU"),
        add("--timing-log-level", "0 logs no timers, 2 all of them", [0, 1, 2], 0),
        add("--timing-log-option", "which ranks' times", ["max", "minmax", "all"], "minmax"),
        files("--tensorboard-dir", "write a TensorBoard log here", str, metavar="DIR"),
        add("--tensorboard-log-interval", "iterations between points", positive_int, 1),
    ],
    "checkpoints": [
        files("--save", "write checkpoints here: at the end, on SIGTERM, and every --save-interval", str, metavar="DIR"),
        files("--save-interval", "iterations between checkpoints", positive_int),
        files("--load", "resume from this checkpoint, also of Megatron-LM; start anew if there is none", str, metavar="DIR"),
        files("--exit-on-missing-checkpoint", "end with exit code 2 if --load has no checkpoint"),
        add("--ckpt-format", "how checkpoints are written", ["torch_dist"], "torch_dist"),
        add("--no-save-optim", "do not save the optimizer"),
        add("--no-load-optim", "do not load the optimizer"),
        files("--finetune", "load the weights alone and start at iteration 0"),
        length("--exit-interval", "save and exit at an iteration that is a multiple of this", positive_int),
        length("--exit-duration-in-mins", "save and exit after this time", positive_float),
    ],
}
# fmt: on
# With these values any training runs under megatron-core's own 1F1B.
STOCK_1F1B = neutral(Role.CHUNKS, Role.SCHEDULE, Role.DETAILS)
