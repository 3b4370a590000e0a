"""All ways to distribute a model over the GPUs of a cluster, as flags that ``pretrain_gpt.py`` accepts.

From the flags of one training: its own layout and schedule are replaced, all else stays. torch is needed here, since flags are
checked as training checks them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from megatron.pipeline.flags.flags import neutral
from megatron.pipeline.flags.settings import Flags, Role, Settings
from megatron.pipeline.planner import Placement, Variant, Vocabulary, balanced_by_weight, families, hybrid
from megatron.pipeline.tune.candidate import Candidate, Cluster

# The flags that the search itself sets, with the values that they have where it does not.
SEARCHED = neutral(Role.LAYOUT, Role.CHUNKS, Role.SCHEDULE, Role.MEMORY) | {"micro_batch_size": 1}
# Flags that only work with --vocab-parallel: where one is given, no layout without it is tried.
_NEEDS_VOCAB_PARALLEL = ("vocab_logits_limit", "vocab_mask_padding", "label_smoothing", "z_loss")

FULL_RECOMPUTE: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
CORE_RECOMPUTE: dict[str, Any] = {"recompute_granularity": "selective"}
# The families to try where the user names none, those with one chunk per rank first; and those that megatron-core has itself.
_SUGGESTED = [family for family in families.FAMILIES.values() if family.suggested]
OURS = [family.name for family in sorted(_SUGGESTED, key=lambda family: family.chunks > 1)]
STOCKS = [name for name, family in families.FAMILIES.items() if family.exposed_hops]
OVERLAP: dict[str, Any] = {"overlap_moe_expert_parallel_comm": True, "moe_token_dispatcher_type": "alltoall"}
_CHUNKS = {"interleaved": (2, 3, 4)}  # of families that take several; more hardly help those that split the backward
_STOCK_CHUNKS = {"interleaved": (2, 3, 4, 5, 8, 12)}  # those that published trainings have, too
_STAGES, _BALANCED = "pipeline_model_parallel_layout", "balanced"
BF16_MOMENTS: dict[str, Any] = {"use_precision_aware_optimizer": True, "exp_avg": "bf16", "exp_avg_sq": "bf16"}
LONG = 4096  # tokens of a sequence that are worth cutting up


@dataclass(frozen=True)
class LayoutChoices:
    """Values to try, by dimension; None for all values that may be of use.

    Attributes:
        tensor, pipeline, context, expert, microbatch: sizes.
        schedules: names of families.
        numerics: whether what is trained may change where memory is short: see ``Layouts.narrower``.
    """

    tensor: Sequence[int] | None = None
    pipeline: Sequence[int] | None = None
    context: Sequence[int] | None = None
    expert: Sequence[int] | None = None
    microbatch: Sequence[int] | None = None
    schedules: Sequence[str] | None = None
    numerics: bool = False


@dataclass
class Layouts:
    """All layouts of a model on a cluster.

    Attributes:
        base: flags of a training as they were read, with ``vocab_size``; the engine of its layers is what GPUs would use.
        refused: why sizes contradict each other, with the number of layouts for each reason.
    """

    base: Flags
    cluster: Cluster
    choices: LayoutChoices = LayoutChoices()
    refused: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every layout under megatron-core's own schedule, as flags."""
        base, gpus, choices, batch = self.base, self.cluster.gpus, self.choices, self.base.global_batch_size
        tensors = choices.tensor or _powers(min(self.cluster.per_node, gpus))
        contexts = choices.context or _powers(max(1, base.seq_length // LONG))
        experts = choices.expert or _powers(base.num_experts or 1)
        for tensor, context, expert, alone in product(tensors, contexts, experts, (None, 1)):
            if alone and (tensor == 1 or expert == 1):
                continue  # each expert is on one rank anyway, or on all of them
            left, rest = divmod(gpus, tensor * context)
            longest = min(left, (base.num_layers or left) + 2)  # the ends may have no layer, and no other stage
            pipelines = [] if rest else [size for size in choices.pipeline or range(1, longest + 1) if left % size == 0]
            if not pipelines:
                self.refused[_why_not_divided(gpus, tensor, context, choices.pipeline or ())] += 1
            for pipeline in pipelines:
                data = gpus // (tensor * context * pipeline)
                microbatches = [size for size in choices.microbatch or (1, 2, 4, 8) if batch % (size * data) == 0]
                if not microbatches:
                    self.refused[f"a batch of {batch} cannot be divided among {data} data-parallel ranks"] += 1
                for microbatch in microbatches:
                    shared = data * context > 1 and base.optimizer == "adam"
                    layout = {
                        "tensor_model_parallel_size": tensor,
                        "context_parallel_size": context,
                        "expert_model_parallel_size": expert,
                        "expert_tensor_parallel_size": alone,
                        "pipeline_model_parallel_size": pipeline,
                        "micro_batch_size": microbatch,
                        "sequence_parallel": tensor > 1,
                        "use_distributed_optimizer": shared,
                        "overlap_grad_reduce": shared and data > 1,
                        "overlap_param_gather": shared and data > 1,
                    }
                    try:
                        self.changed(layout)
                    except ValueError as error:
                        self.refused[str(error)] += 1
                    else:
                        yield layout

    def changed(self, changes: Mapping[str, Any]) -> Settings:
        """The flags of a training with other values, validated.

        Raises:
            ValueError: they do not go together.
        """
        from megatron.pipeline.flags.validation import validate
        from megatron.pipeline.session.tokenizer import sizes_of_vocabulary

        args = validate(self.base | SEARCHED | changes, self.cluster.gpus, elsewhere=True)
        return args | sizes_of_vocabulary(args.vocab_size, args)

    def candidates(self, layout: Mapping[str, Any], stock: bool) -> Iterator[Candidate]:
        """All schedules of a layout, without measures that save memory: see ``remedies``.

        Args:
            stock: those that megatron-core has, instead of ours: all, and ``choices`` restrict ours alone.
        """
        ranks = layout["pipeline_model_parallel_size"]
        pipelined = ranks > 1
        names = STOCKS if stock else self.choices.schedules or OURS
        methods: list[dict[str, Any]] = [{}]
        if pipelined and self.base.hybrid_layer_pattern:  # whose stages are balanced
            methods += [] if stock else [{"vocab_parallel": str(Vocabulary.ONE_BARRIER)}]
        elif pipelined and stock:
            methods.append({"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True})
            methods += [{_STAGES: self.base.pipeline_model_parallel_layout}] if self.base.pipeline_model_parallel_layout else []
            methods += [{_STAGES: _BALANCED}] if self.base.mtp_num_layers else []  # which are on the last stage, and weigh more
        elif pipelined:
            methods += [{"layer_redistribution": True}, {"vocab_parallel": str(Vocabulary.ONE_BARRIER)}]
        if any(getattr(self.base, name) for name in _NEEDS_VOCAB_PARALLEL):
            methods = [changes for changes in methods if "vocab_parallel" in changes]
        overlapped = set()  # where redistribution moves no layer, one is enough
        for changes, variant in product(methods, _variants(names, ranks, _STOCK_CHUNKS if stock else _CHUNKS)):
            chosen: dict[str, Any] = {} if stock else {"pipeline_schedule": variant.name}
            if families.named(variant.name).any_chunks and variant.chunks and _STAGES not in changes:
                chosen["num_virtual_stages_per_pipeline_rank"] = variant.chunks
            flags = {**layout, **changes, **chosen}
            try:
                if flags.get(_STAGES) == _BALANCED:
                    flags[_STAGES] = self._stages(families.placement(variant.name, ranks, variant.chunks))
                yield (alone := self._candidate(variant, flags))
            except ValueError as error:
                self.refused[str(error)] += 1
                continue
            cut = variant, alone.layers
            if flags["expert_model_parallel_size"] > 1 and cut not in overlapped:
                with suppress(ValueError):  # training does not allow all of it
                    own = self.base.moe_token_dispatcher_type
                    sends = {} if own == "allgather" else {"moe_token_dispatcher_type": own}
                    yield self._candidate(variant, flags | OVERLAP | sends)
                    overlapped.add(cut)

    def _stages(self, placement: Placement) -> str:
        """A layout in which the ends of the vocabulary count as a layer each, and a layer of multi-token prediction as two."""
        last, predictors = placement.last_stage, self.base.mtp_num_layers or 0
        counts = balanced_by_weight([1.0] * self.base.num_layers, placement, {0: 1.0, last: 1.0 + 2 * predictors})
        rows = ["t" * layers for layers in counts]
        rows[0], rows[last] = "E" + rows[0], rows[last] + "m" * predictors + "L"
        return "|".join(rows)

    def remedies(self, candidate: Candidate, worth: Callable[[Mapping[str, Any]], bool] = bool) -> Iterator[Candidate]:
        """The same candidate with recomputation or offloading, which take less memory and more time, or in fewer bits.

        Args:
            worth: whether to try what some flags change.
        """
        args = candidate.args
        if args.recompute_granularity is None:
            fused = {"recompute_fused_backward": not candidate.is_stock}
            ways: list[dict[str, Any]] = [FULL_RECOMPUTE | fused]
            own = {name: getattr(self.base, name) for name in _RECOMPUTE}
            if own["recompute_granularity"] and own != dict.fromkeys(_RECOMPUTE) | FULL_RECOMPUTE:  # as the training was written
                ways.append(own)
            if args.multi_latent_attention:
                ways.append(CORE_RECOMPUTE | {"recompute_modules": ["mla_up_proj"]})
            if args.transformer_impl == "local":
                ways.append(dict(CORE_RECOMPUTE))
            yield from self._changed_all(candidate, filter(worth, ways))
            yield from self.narrower(candidate)
        if args.offloading.mode is None and not candidate.is_stock and args.pipeline_model_parallel_size > 1:
            yield from self._changed_all(candidate, filter(worth, [{"offload": "full"}]))

    def narrower(self, candidate: Candidate) -> Iterator[Candidate]:
        """The same candidate whose gradients, or else Adam's moments and FP8's weights, are in fewer bits, where that may be."""
        args, ways = candidate.args, list[dict[str, Any]]()
        if self.choices.numerics and args.bf16 and not args.grad_reduce_in_bf16:
            ways = [{"grad_reduce_in_bf16": True}]
        elif self.choices.numerics and args.use_distributed_optimizer and not args.use_precision_aware_optimizer:
            ways = [BF16_MOMENTS | ({"fp8_param_gather": True} if args.fp8 else {})]
        yield from self._changed_all(candidate, ways)

    def interlocked(self, candidate: Candidate) -> Iterator[Candidate]:
        """The same candidate with post-validation, and families that plan for the memory limit, with post-validation too."""
        ranks = candidate.args.pipeline_model_parallel_size
        if candidate.is_stock or ranks == 1:
            return
        yield from self._changed_all(candidate, [{"post_validation": True}])
        names = [name for name in self.choices.schedules or OURS if families.named(name).plans_for_limits]
        for variant in _variants(names, ranks, _CHUNKS):
            if variant != candidate.variant:
                changes = {**candidate.changes, "post_validation": True, "pipeline_schedule": variant.name}
                changes["num_virtual_stages_per_pipeline_rank"] = variant.chunks
                with suppress(ValueError):
                    yield self._candidate(variant, changes)

    def _changed_all(self, candidate: Candidate, ways: Iterable[Mapping[str, Any]]) -> Iterator[Candidate]:
        for changes in ways:
            try:
                yield self._candidate(candidate.variant, {**candidate.changes, **changes})
            except ValueError as error:
                self.refused[str(error)] += 1

    def _candidate(self, variant: Variant, changes: Mapping[str, Any]) -> Candidate:
        from megatron.pipeline.model.layout import balanced_by_cost, decoder_layers
        from megatron.pipeline.session.memory import beside

        args = self.changed(changes)
        placement = families.placement(variant.name, args.pipeline_model_parallel_size, variant.chunks)
        if self.base.hybrid_layer_pattern and placement.depth > 1:
            counts = balanced_by_cost(args, placement, self.cluster.device, self.cluster.per_node)
            pattern = hybrid.Pattern.of(self.base.hybrid_layer_pattern).cut(counts)
            changes = {**changes, "hybrid_layer_pattern": pattern, "num_virtual_stages_per_pipeline_rank": None}  # as | says
            args = self.changed(changes)
        layers = tuple(decoder_layers(args, placement))
        family = families.named(variant.name)
        kept = beside(args, placement, args.vocabulary.spread, in_bytes=True) if family.memory or family.keeps else None
        candidate = Candidate(args, changes, variant, layers, kept)
        if variant.name == "interleaved" and candidate.microbatches % placement.ranks:
            raise ValueError(f"interleaved needs microbatches that are a multiple of {placement.ranks} ranks")
        return candidate


def _why_not_divided(gpus: int, tensor: int, context: int, pipelines: Sequence[int]) -> str:
    """Why these sizes cannot use that number of GPUs, with the first sizes that show it."""
    if gpus % tensor:
        return f"{gpus} GPUs are not a multiple of TP {tensor}"
    if gpus % (tensor * context):
        return f"{gpus} GPUs are not a multiple of TP {tensor} x CP {context}"
    return f"{gpus} GPUs are not a multiple of TP {tensor} x CP {context} x PP {' or '.join(map(str, pipelines))}"


def _variants(names: Sequence[str], ranks: int, chunks: Mapping[str, Sequence[int]]) -> Iterator[Variant]:
    if ranks == 1:
        yield Variant("1f1b")
        return
    for name in names:
        family = families.named(name)
        if family.any_chunks and family.chunks > 1:
            yield from (Variant(name, each) for each in chunks.get(name, (2,)))
        else:
            yield Variant(name)


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]
