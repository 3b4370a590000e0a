"""Stands for Megatron-LM's pretrain_gpt.py; see megatron/training/__init__.py beside it."""

import zlib
from functools import partial

import torch
from megatron.core import mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model, unwrap_model
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_batch_on_this_tp_rank, is_first_or_last_pipeline_stage

NAMES = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    args = get_args()
    config = core_transformer_config_from_args(args)
    if args.num_experts:
        spec = get_gpt_decoder_block_spec(config, False, normalization=args.normalization, vp_stage=vp_stage)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    further = None
    if args.mtp_num_layers:
        layers = get_gpt_decoder_layer_specs(config, False, normalization=args.normalization, vp_stage=vp_stage)
        further = get_gpt_mtp_block_spec(config, layers[-1], False, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.seq_length,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        mtp_block_spec=further,
        vp_stage=vp_stage,
    )


class Samples:
    """Like upstream's, it can only say what is next."""

    def __init__(self):
        self._random = torch.Generator().manual_seed(1 + mpu.get_data_parallel_rank())

    def __next__(self):
        args = get_args()
        text = torch.randint(args.vocab_size, (args.micro_batch_size, args.seq_length + 1), generator=self._random)
        positions = torch.arange(args.seq_length).expand(args.micro_batch_size, -1).contiguous()
        mask = torch.ones(args.micro_batch_size, args.seq_length)
        mask[:, ::3] = 0
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        hidden = torch.ones(args.seq_length, args.seq_length).triu(1).bool().expand(args.micro_batch_size, 1, -1, -1).clone()
        if args.reset_attention_mask:  # documents that end with a token below 8: some two in a sequence
            document = (tokens < 8).cumsum(dim=1) - (tokens < 8).long()
            hidden |= (document[:, :, None] != document[:, None, :])[:, None]
        if args.sft:  # two sequences, and tokens without loss behind the second
            ends = torch.randint(1, args.seq_length // 2, (2,), generator=self._random)
            mask = (torch.arange(args.seq_length) < ends.sum()).float()[None]
            bounds = torch.tensor([[0, int(ends[0]), args.seq_length]], dtype=torch.int32)
            given = dict(zip(NAMES, (tokens, labels, mask, positions), strict=False))
            return given | {"cu_seqlens": bounds, "max_seqlen": bounds.diff().max().reshape(1)}
        return dict(zip(NAMES, (tokens, labels, mask, positions, hidden), strict=True))


def apart(bounds, length):
    """Hides what is later, or of another sequence."""
    document = torch.bucketize(torch.arange(length), bounds[0, 1:], right=True)
    return (torch.ones(length, length).triu(1).bool() | (document[:, None] != document[None]))[None, None]


def datasets_provider(vp_stage=None):
    here = is_first_or_last_pipeline_stage(vp_stage) and mpu.get_tensor_model_parallel_rank() == 0
    return Samples() if here else None


def loss_func(loss_mask, output_tensor, model=None):
    losses, mask = output_tensor.view(-1).float(), loss_mask.view(-1)
    loss, tokens = torch.sum(losses * mask), mask.sum().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for message, reject in (("found NaN", torch.isnan), ("found Inf", torch.isinf)):
            get_rerun_state_machine().validate_result(loss, reject, f"{message} in local forward loss calculation")
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def forward_step(data_iterator, model, return_schedule_plan=False):
    chunk = get_attr_wrapped_model(model, "vp_stage")
    batch = get_batch_on_this_tp_rank(data_iterator) if is_first_or_last_pipeline_stage(chunk) else dict.fromkeys(NAMES)
    tokens, labels, loss_mask, positions, hidden = (batch.get(name) for name in NAMES)
    if get_args().sft and "cu_seqlens" in batch:
        hidden = apart(batch["cu_seqlens"], get_args().seq_length)
    run = get_attr_wrapped_model(model, "build_schedule_plan") if return_schedule_plan else model
    output = run(tokens, positions, hidden, labels=labels, loss_mask=loss_mask)
    return output, partial(loss_func, loss_mask, model=model)


def same_weights_everywhere(model):
    """Stands for a checkpoint: weights that depend on their name and their layer, not on the rank."""
    args = get_args()
    for part in unwrap_model(model):
        layers = {f"decoder.layers.{number}.": f"layer {layer.layer_number}." for number, layer in enumerate(part.decoder.layers)}
        for name, parameter in part.named_parameters():
            here = next((prefix for prefix in layers if name.startswith(prefix)), "")
            if parameter.dim() > 1 and "vocabulary" not in name:
                tied = "output_layer" in name and not args.untie_embeddings_and_output_weights
                draw(parameter, "embedding.word_embeddings.weight" if tied else layers.get(here, "") + name.removeprefix(here))
        if hasattr(part, "vocabulary"):
            rows = torch.empty(args.padded_vocab_size, args.hidden_size)
            draw(rows, "embedding.word_embeddings.weight")
            shards, index = part.vocabulary.shards, part.vocabulary.index
            own, count = shards.own(index), shards.stored(index)
            part.vocabulary.embedding.weight.data[:count] = rows[own.start : own.start + count]


def draw(parameter, key):
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))


if __name__ == "__main__":
    pretrain(datasets_provider, model_provider, forward_step, same_weights_everywhere)
