"""Train a GPT, or a pattern, with the ``megatron.training`` that pip's megatron-core brings from 0.17 on: no checkout is needed.

    mpipe launch --nproc-per-node 4 examples/pretrain_with_pip.py --pipeline-model-parallel-size 4 --pipeline-schedule zb-v \
        --num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 \
        --micro-batch-size 2 --global-batch-size 16 --train-iters 10 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 127 \
        --mock-data --eval-interval 100 --eval-iters 0

It calls ``pretrain`` as Megatron-LM's own ``pretrain_gpt.py`` does, with what builds a chunk of the model, what makes datasets,
and what runs a microbatch up to its loss. All flags are Megatron-LM's and ours.
"""

import inspect
from functools import partial
from typing import Any

import torch
from megatron.core import mpu, utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.training import arguments, get_args, get_tokenizer, pretrain
from megatron.training import utils as training_utils
from megatron.training.datasets.sft_dataset import SFTDataset

NAMES = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
PACKED = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size")  # where the sequences of --sft begin


def build_chunk(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, config: Any = None, **_: Any
) -> GPTModel:
    """A GPTModel of one stage: the layers that its configuration places there."""
    args = get_args()
    config = config or arguments.core_transformer_config_from_args(args)
    engine = args.transformer_impl == "transformer_engine"
    options = {"normalization": args.normalization, "vp_stage": vp_stage}
    further = None
    if args.mtp_num_layers:
        last = get_gpt_decoder_layer_specs(config, engine, **options)[-1]
        further = get_gpt_mtp_block_spec(config, last, engine, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, engine, **options),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        mtp_block_spec=further,
        vp_stage=vp_stage,
    )


def reads_microbatches(vp_stage: int | None) -> tuple[bool, bool]:
    """The first stage reads tokens, the last labels, one with layers for further tokens both; with --sft all read bounds."""
    config = arguments.core_transformer_config_from_args(get_args())
    where = {"layout": config.pipeline_model_parallel_layout, "mtp_num_layers": config.mtp_num_layers}
    if "config" in inspect.signature(mtp_on_this_rank).parameters:  # up to 0.17
        where = {"config": config}
    further = mtp_on_this_rank(ignore_virtual=False, vp_stage=vp_stage, **where)
    return training_utils.is_first_or_last_pipeline_stage(vp_stage) or further or get_args().sft, further


def batch_of(data: Any, vp_stage: int | None) -> dict[str, Any]:
    """A microbatch on this rank: the first tensor-parallel rank reads it and tells the others."""
    args, (reads, further) = get_args(), reads_microbatches(vp_stage)
    if not reads:
        return dict.fromkeys(NAMES)
    if hasattr(training_utils, "get_batch_on_this_tp_rank"):  # up to 0.17
        return training_utils.get_batch_on_this_tp_rank(data, mtp_on_this_rank=further)
    first = mpu.get_tensor_model_parallel_rank() == 0
    batch = {name: value.cuda(non_blocking=True) for name, value in next(data).items()} if first else {}
    given = {
        "batch": {name: batch.get(name) for name in (*NAMES, *PACKED)},
        "is_sft": args.sft,
        "has_cu_seqlens": args.sft,
        "is_hybrid_cp": False,
        "create_attention_mask_in_dataloader": args.create_attention_mask_in_dataloader,
        "broadcast_src_rank": mpu.get_tensor_model_parallel_src_rank(),
        "broadcast_group": mpu.get_tensor_model_parallel_group(),
        "cp_size": args.context_parallel_size,
        "tp_rank": mpu.get_tensor_model_parallel_rank(),
        "micro_batch_size": args.micro_batch_size,
        "seq_length": args.seq_length,
        "mtp_on_this_rank": further,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "is_pipeline_first_stage": mpu.is_pipeline_first_stage(),
        "is_pipeline_last_stage": mpu.is_pipeline_last_stage(),
    }
    taken = inspect.signature(inspect.unwrap(utils.get_batch_on_this_tp_rank)).parameters
    batch = utils.get_batch_on_this_tp_rank(**{name: value for name, value in given.items() if name in taken})
    if args.sft:
        batch = utils.flatten_batch_for_packed_sequences(batch)
    if args.sft and not any(batch.get(name) is not None for name in NAMES):
        return batch  # a stage between the ends
    return utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def loss_of(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The sum of the losses of tokens that count, and their number; and both for the log."""
    losses, mask = output.view(-1).float(), mask.view(-1).float()
    loss, tokens = torch.sum(losses * mask), mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(data: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """One microbatch through one chunk."""
    batch = batch_of(data, utils.get_attr_wrapped_model(model, "vp_stage"))
    inputs: list[Any] = [batch.get(name) for name in NAMES]
    tokens, labels, mask, attention, positions = inputs
    run = utils.get_attr_wrapped_model(model, "build_schedule_plan") if return_schedule_plan else model
    packed = {}
    if batch.get("cu_seqlens") is not None:
        bounds, longest = batch["cu_seqlens"][0], int(batch["max_seqlen"])
        packed["packed_seq_params"] = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)
    return run(tokens, positions, attention, labels=labels, loss_mask=mask, **packed), partial(loss_of, mask)


def datasets(samples: Any, vp_stage: int | None = None) -> Any:
    """Training, validation and test data, on the first tensor-parallel rank of stages that read."""
    args = get_args()
    blend, blends = training_utils.get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blends,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        context_parallel_size=args.context_parallel_size,
    )

    def here() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and reads_microbatches(vp_stage)[0]

    kind = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, samples, here, config).build()


vars(datasets)["is_distributed"] = True  # every stage's ranks ask for what they read

if __name__ == "__main__":
    training = (datasets, build_chunk, ModelType.encoder_or_decoder, forward_step)
    if hasattr(arguments, "parse_and_validate_args"):  # from 0.18 on
        from megatron.training import argument_utils

        args = arguments.parse_and_validate_args()
        # From 0.19 on the model is a configuration, too, and may be one of letters.
        kind = "hybrid" if args.hybrid_layer_pattern else "gpt"
        configured = hasattr(argument_utils, "gpt_config_from_args")
        model = getattr(argument_utils, f"{kind}_config_from_args") if configured else None
        settings = argument_utils.pretrain_cfg_container_from_args(args, *([model(args)] if model else []))
        if model:
            pretrain(settings, datasets, ModelType.encoder_or_decoder, forward_step)
        else:
            pretrain(settings, *training)
    else:
        pretrain(*training)
