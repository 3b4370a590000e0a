"""What torch allocates at most, predicted and measured: functional tests of Megatron-LM on 8 GPUs.

Numbers are ``mem-max-allocated-bytes`` of the golden values (dev container) in Megatron-LM's tests/functional_tests/test_cases at
commit d98e8a64, of the rank that logs: the last. Flags that change no memory are left out. docs/model.md has
all of them.
"""

from __future__ import annotations

from statistics import median

import pytest

from megatron.pipeline.cli.memory import predicted
from megatron.pipeline.model.description import describe
from megatron.pipeline.planner.costmodel.device import named
from megatron.pipeline.planner.costmodel.memory import predict

BASE = (
    "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --micro-batch-size 4 --global-batch-size 32 "
    "--train-iters 50 --lr 1e-4 --vocab-file gpt2 --pipeline-schedule stock --attention-softmax-in-fp32 --transformer-impl"
)
PP4, TP2 = "--pipeline-model-parallel-size 4", "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
UNFUSED = "transformer_engine --attention-backend unfused"
UNTIED, SHARDED = "--untie-embeddings-and-output-weights", "--use-distributed-optimizer --overlap-grad-reduce"
PEAKS = {
    "gpt3_mcore_te_tp1_pp4_disable_bias_linear": (f"{UNFUSED} --bf16 {PP4} --disable-bias-linear", 2685510144),
    "gpt3_mcore_te_tp1_pp4_resume_torch_dist_swiglu": (f"transformer_engine --bf16 {PP4} --swiglu", 2194839040),
    "gpt3_mcore_te_tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce": (
        f"{UNFUSED} --bf16 {PP4} {SHARDED} --num-layers-per-virtual-pipeline-stage 1",
        3912607232,
    ),
    "gpt3_mcore_te_tp2_pp2": (f"{UNFUSED} --bf16 {TP2}", 1900158464),
    "gpt3_mcore_te_tp2_pp2_cross_entropy_loss_fusion": (
        f"transformer_engine --bf16 {TP2} --cross-entropy-loss-fusion",
        2245028864,
    ),
    "gpt3_mcore_te_tp2_pp2_defer_embedding_wgrad_compute": (
        f"{UNFUSED} --bf16 {TP2} --defer-embedding-wgrad-compute --wgrad-deferral-limit 2",
        2340560384,
    ),
    "gpt3_mcore_te_tp2_pp2_mla": (
        f"{UNFUSED} --bf16 {TP2} --num-layers 4 --sequence-parallel {UNTIED} --multi-latent-attention --q-lora-rank 192 "
        "--kv-lora-rank 64 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16",
        1216200192,
    ),
    "gpt3_mcore_tp2_pp2_uninstall_te": (f"local --fp16 {TP2} --no-masked-softmax-fusion", 2086473728),
    "gpt3_mcore_tp2_pp2_ep2_te_4experts2parallel": (
        f"local --attention-backend unfused --bf16 {TP2} --sequence-parallel --num-experts 4 --expert-model-parallel-size 2 "
        "--moe-router-topk 1 --moe-router-pre-softmax --disable-bias-linear",
        2067487488,
    ),
    "gpt3_7b_tp1_pp4_memory_speed": (
        f"transformer_engine --bf16 {PP4} {SHARDED} {UNTIED} --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --seq-length 8192 --micro-batch-size 1 --global-batch-size 8 "
        "--vocab-size 131073 --num-layers-per-virtual-pipeline-stage 1",
        60489064448,
    ),
}
MOVED = (
    f"{UNFUSED} --bf16 {TP2} --num-layers 15 --moe-layer-freq ([0]*3+[1]*12) --hidden-size 1024 --ffn-hidden-size 4096 "
    "--num-attention-heads 32 --kv-channels 128 --seq-length 4096 --micro-batch-size 1 --global-batch-size 8 "
    "--make-vocab-size-divisible-by 3232 --normalization RMSNorm --swiglu --multi-latent-attention --q-lora-rank 1536 "
    "--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --attention-dropout 0 --hidden-dropout 0 "
    "--disable-bias-linear --position-embedding-type rope --qk-layernorm --num-experts 32 --moe-ffn-hidden-size 1024 "
    "--moe-shared-expert-intermediate-size 1024 --moe-router-topk 4 --moe-token-dispatcher-type alltoall --moe-grouped-gemm "
    f"--moe-router-pre-softmax --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --sequence-parallel {UNTIED} "
    "--use-distributed-optimizer --recompute-granularity selective --recompute-modules layernorm mla_up_proj mlp moe_act "
    "--fine-grained-activation-offloading --offload-modules expert_fc1 moe_act attn_norm mlp_norm qkv_linear core_attn attn_proj"
)
LAYOUT = "--pipeline-model-parallel-layout Et*3|(tt|)*6"
# On later GPUs: by the name of a test, its flags, and what was measured on each.
LATER = {
    "gpt3_mcore_te_tp2_pp2_cross_entropy_loss_fusion": (
        PEAKS["gpt3_mcore_te_tp2_pp2_cross_entropy_loss_fusion"][0],
        {"H100-80GB": 1837640192, "GB200": 1838393856},
    ),
    "gpt3_moe_mcore_te_tp2_pp2_ep4_etp1_fine_grained_offloading": (
        f"{MOVED} {LAYOUT}mL --mtp-num-layers 1 --overlap-moe-expert-parallel-comm",
        {"H100-80GB": 8320577024, "GB200": 8285552128},
    ),
    "gpt3_moe_mcore_te_tp2_pp2_ep4_etp1_no_mtp_no_a2a_ovlp_fine_grained_offloading": (
        f"{MOVED} {LAYOUT}L",
        {"H100-80GB": 7156871168, "GB200": 7109236224},
    ),
}


@pytest.fixture(scope="module")
def deviations() -> dict[str, float]:
    """Relative, by the name of a test."""
    on_a100 = {name: (flags, {"A100-80GB": measured}) for name, (flags, measured) in PEAKS.items()}
    found = {}
    for name, (flags, peaks) in (*on_a100.items(), *LATER.items()):
        training = predicted([*BASE.split(), *flags.split()], world_size=8)
        for gpu, measured in peaks.items():
            ranks = predict(describe(training.args), training.schedule, training.layers, named(gpu))
            found[f"{name}, {gpu}"] = ranks[-1].allocated / measured - 1
    return found


def test_peaks_are_within_four_percent(deviations: dict[str, float]) -> None:
    assert {name: f"{by:+.1%}" for name, by in deviations.items() if abs(by) > 0.04} == {}
    assert median(map(abs, deviations.values())) < 0.015
