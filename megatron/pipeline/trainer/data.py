"""Samples: megatron-core's indexed and blended datasets, read where they are needed, in one order for all restarts."""

from __future__ import annotations

import logging
import math
import re
import signal
import warnings
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import Split
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_attr_wrapped_model

from megatron.pipeline.distributed.device import this_device
from megatron.pipeline.trainer.data_files import blend, blend_per_split, check_prefix, split_has_tokens

Batch = dict[str, torch.Tensor]


def sequential(total: int, consumed: int, micro_batch: int, rank: int, ranks: int) -> Iterator[list[int]]:
    """Indices of one data-parallel rank's microbatches: the global order, from the first sample not yet consumed.

    Consecutive microbatches of all data-parallel ranks follow each other in the global order, as in Megatron-LM, so the
    order depends on the number of consumed samples alone and not on how often the training was restarted.

    Raises:
        ValueError: fewer samples are left than one microbatch of every data-parallel rank needs.
    """
    together = micro_batch * ranks
    if total - consumed < together:
        raise ValueError(f"{consumed} of {total} samples are consumed: {together} more are needed for one microbatch")
    first = consumed + rank * micro_batch
    return (
        list(range(start, start + micro_batch)) for start in range(first, total - together + rank * micro_batch + 1, together)
    )


def check_data(args: Namespace, vocab_size: int) -> None:
    """Read the index of every data file, before any process group exists.

    Raises:
        ValueError: a file is missing, truncated or not Megatron's; its tokens are not of this tokenizer; or a split
            that is asked for would be empty.
    """
    if args.mock_data:
        return
    for number, (source, name) in enumerate(zip(blend_per_split(args), ("training", "validation", "test"), strict=True)):
        for prefix in source[0] if source else []:
            check_prefix(prefix, vocab_size)
            wanted = number == Split.train.value or (number == Split.valid.value and evaluates(args))
            if wanted and not split_has_tokens(prefix, args.split, number):
                raise ValueError(
                    f"{prefix}: --split {args.split} gives no document to {name}: give it a larger share, "
                    + ("or prepare more documents" if number == Split.train.value else "or give --eval-iters 0")
                )


def evaluates(args: Namespace) -> bool:
    """Tell whether the training stops for evaluations."""
    return bool(args.eval_iters > 0)


class Samples:
    """The three splits of the data, as microbatches of this rank.

    Every tensor-parallel rank reads for itself: the order is deterministic, so no broadcast is needed. Ranks that hold
    neither the first nor the last stage read nothing, except where the attention mask depends on the tokens, or where every
    rank has a shard of the vocabulary: its first chunk then reads.
    """

    def __init__(self, args: Namespace, tokenizer: Any, chunks: Sequence[MegatronModule]) -> None:
        self._args = args
        self._needed = reading(args, chunks)
        sizes = [args.train_iters, 0, 0]
        if evaluates(args):
            sizes[1] = (args.train_iters // args.eval_interval + 1) * args.eval_iters
            sizes[2] = args.eval_iters
        self._datasets = _build(args, tokenizer, [size * args.global_batch_size for size in sizes], any(self._needed))

    @contextmanager
    def microbatches(self, split: Split, consumed: int) -> Iterator[list[Iterator[Batch] | None] | None]:
        """One iterator per chunk, from the first sample not yet consumed; None when the split is empty on all ranks.

        Leaving the context ends the processes that read.
        """
        exists, dataset = self._datasets[split.value]
        if not exists:
            yield None
            return
        with ExitStack() as stack:

            def stream() -> Iterator[Batch]:
                return stack.enter_context(closing(_stream(self._loader(dataset, consumed))))

            yield [stream() if needed else None for needed in self._needed]

    def _loader(self, dataset: Any, consumed: int) -> torch.utils.data.DataLoader[Batch]:
        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        return torch.utils.data.DataLoader(
            dataset,
            batch_sampler=sequential(len(dataset), consumed, self._args.micro_batch_size, rank, ranks),
            num_workers=self._args.num_workers,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_ignore_termination,
        )


def reading(args: Namespace, chunks: Sequence[MegatronModule]) -> list[bool]:
    """Chunks of this rank that need data; see ``Samples``."""
    everywhere, sharded = args.reset_attention_mask, args.vocabulary.spread
    ends = [any(get_attr_wrapped_model(chunk, end) for end in ("pre_process", "post_process")) for chunk in chunks]
    return [everywhere or (sharded and chunk is chunks[0]) or end for chunk, end in zip(chunks, ends, strict=True)]


def cut_for_context_parallelism(batch: Batch) -> Batch:
    """The part of whole sequences that this context-parallel rank has."""
    if parallel_state.get_context_parallel_world_size() <= 1:
        return batch
    part: Batch = utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())
    return part


def get_batch(data: Iterator[Batch] | None) -> Batch:
    """The next microbatch on this rank's device, cut for context parallelism; empty on a chunk that needs no data."""
    if data is None:
        return {}
    device = this_device()
    wanted = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    batch = next(data)
    batch = {name: batch[name].to(device, non_blocking=True) for name in wanted if name in batch}
    return cut_for_context_parallelism(batch)


def forward_step(
    data: Iterator[Batch] | None,
    model: MegatronModule,
    check: Callable[[torch.Tensor], None] | None = None,
    return_schedule_plan: bool = False,
) -> tuple[Any, Any]:
    """One microbatch through one chunk, and the loss function of its output: what megatron-core's schedules call.

    Args:
        check: called with every microbatch's loss.
        return_schedule_plan: return the layers' plan, which is yet to run, in place of the output.
    """
    batch = get_batch(data)
    inputs, mask = [batch.get(name) for name in ("tokens", "position_ids", "attention_mask")], batch.get("loss_mask")
    forward: Any = model.build_schedule_plan if return_schedule_plan else model
    output = forward(*inputs, labels=batch.get("labels"), loss_mask=mask)  # further tokens have losses of their own to mask
    return output, partial(masked_loss, mask, check=check)


def masked_loss(
    mask: torch.Tensor | None, losses: torch.Tensor, check: Callable[[torch.Tensor], None] | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The sum of the losses that count, how many those are, and both together for the log."""
    assert mask is not None, "only the last stage, which has data, computes a loss"
    flat = mask.reshape(-1).float()
    loss = torch.sum(losses.reshape(-1).float() * flat)
    if check is not None:
        check(loss.detach())
    tokens = flat.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def check_finite(losses: Sequence[torch.Tensor]) -> None:
    """Refuse losses of microbatches that are not finite.

    Raises:
        RuntimeError: one is not.
    """
    wrong = [loss for loss in torch.stack(list(losses)).tolist() if not math.isfinite(loss)] if losses else []
    if wrong:
        raise RuntimeError(
            f"the loss of a microbatch is {wrong[0]} on rank {torch.distributed.get_rank()}: lower --lr, or go on "
            "regardless with --no-check-for-nan-in-loss-and-grad"
        )


def _stream(loader: torch.utils.data.DataLoader[Batch]) -> Generator[Batch, None, None]:
    """The loader's batches; closing it ends the loader's processes even while something else refers to the loader."""
    yield from loader


def _ignore_termination(_worker: int) -> None:
    """A SIGTERM to the whole process group is the trainer's to handle: it still needs its readers for one iteration."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _build(args: Namespace, tokenizer: Any, sizes: list[int], needed: bool) -> list[tuple[bool, Any]]:
    """For every split, whether it exists anywhere, and its dataset on the ranks that need it."""
    per_split = args.train_data_path is not None
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None if per_split or args.mock_data else blend(args.data_path),
        blend_per_split=blend_per_split(args) if per_split else None,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.reset_attention_mask,  # without resets the attention makes its own causal mask
    )
    exists = [bool(size) for size in sizes]
    if not args.mock_data:
        for number, source in enumerate(blend_per_split(args)):
            exists[number] &= source is not None and all(split_has_tokens(p, args.split, number) for p in source[0])
            # megatron-core would search forever for samples in an empty split.
            if not exists[number]:
                (config.blend_per_split if per_split else config.split_matrix)[number] = None
    kind = MockGPTDataset if args.mock_data else GPTDataset
    # The builder's caches are written by rank 0 for all others, so it always builds.
    built_here = needed or torch.distributed.get_rank() == 0
    upstream = logging.getLogger(MockGPTDataset.__module__)
    upstream.addFilter(_is_not_of_mock_data)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")  # the data files are mapped read-only on purpose
            datasets = BlendedMegatronDatasetBuilder(kind, sizes, lambda: built_here, config).build()
    finally:
        upstream.removeFilter(_is_not_of_mock_data)
    return list(zip(exists, datasets, strict=True))


def _is_not_of_mock_data(record: logging.LogRecord) -> bool:
    """False for upstream's warning, for every split, that mock data has no cache of its order: it is drawn in no time."""
    return not re.search(r"Unable to save Mock\w+ indexes", record.getMessage())
