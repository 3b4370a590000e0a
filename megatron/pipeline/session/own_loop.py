"""Anybody's loop on megatron-core under a schedule, after one call of ``megatron.pipeline.install``.

What such a loop does with megatron-core comes by here, in this order: the configuration of a model when it is made (``lay_out``)
and before any of its layers is built (``configure``), the two ends of a model (``ties``), each chunk before DDP wraps it
(``prepare``), and every iteration (``forward_backward``). Upstream's functions that tell which chunk is first or last ask
``placement``.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.utils import unwrap_model
from megatron.pipeline.patches import compat, distributed_data_parallel, loops

from megatron.pipeline import patches
from megatron.pipeline.flags.facts import cautions_of
from megatron.pipeline.flags.settings import WATCH_MODES, PipelineSettings, Settings, StepSettings, VocabularySettings
from megatron.pipeline.model import chunk_marks, te_linear
from megatron.pipeline.model.adapter import adapter_of
from megatron.pipeline.model.boundary import BoundaryModules
from megatron.pipeline.model.layout import EARLY_PREDICTION, PlacementLayout, balances_letters, costs_of_letters, stage_layers
from megatron.pipeline.model.split_linear import split_chunks
from megatron.pipeline.planner import (
    EQUAL_PASSES,
    STOCK,
    Costs,
    Facts,
    Placement,
    Request,
    Schedule,
    StageCosts,
    Vocabulary,
    balance,
    counted,
    document,
    families,
    hybrid,
    interleaved,
    topics,
)
from megatron.pipeline.runtime.call import Call
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.runtime.watch import watching
from megatron.pipeline.session import checkpoint_failures
from megatron.pipeline.session.call_watch import CallWatch
from megatron.pipeline.session.last_rank import LastRank
from megatron.pipeline.session.memory import equal_stages
from megatron.pipeline.session.startup_lines import buckets_in_words

_NOT_PREPARED = (
    "this model was not built for {name}: megatron.pipeline.install splits the backwards of each chunk that megatron-core's "
    "DistributedDataParallel wraps, and chunk {chunk} is in none that was made after it: call install before the model is built"
)


class OwnLoop:
    """The schedule of a loop.

    Args:
        schedule: its name, or a request, whose numbers of ranks and microbatches do not matter.
        costs: a file of costs, as ``mpipe costs -o`` writes it; of letters they also balance the stages of such a model. Without
            costs all passes of a rank's share take 1, and W as much of it as its weights train.
        options: of ``Pipeline``; and ``watch``: "report" or "replan" for slow ranks and links (``runtime.watch``), where all
            ranks of the world train together.

    Raises:
        ValueError: there is no such schedule, or none that trains; a file cannot be read; or it is none for ``every_batch``, or
            for ``watch``.
        TypeError: ``Pipeline`` has no such option.
    """

    def __init__(
        self, schedule: str | Request, costs: str | Path | None = None, watchdog: float | None = None, **options: Any
    ) -> None:
        self._letter_costs: Costs | None = None
        self._balanced: Settings | None = None  # a model of letters that was built last, if its stages are balanced
        # Ranks and microbatches are known with the first iteration.
        request = Request(schedule, 1, 1) if isinstance(schedule, str) else schedule
        request = replace(request, keep=True)
        families.check(request.schedule, [STOCK])
        if request.schedule.startswith(families.FILE):
            document.naming(request.schedule.removeprefix(families.FILE), Schedule.from_json)
        if costs is not None:
            read = document.read_costs(str(costs))
            self._letter_costs = read if read.pattern else None
            of_letters = partial(costs_of_letters, _flags({}, hybrid_layer_pattern=read.pattern, letter_costs=read))
            request = replace(request, costs=of_letters if read.pattern else read)
        if request.costs is not None and not options.get("every_batch"):  # with equal ones a search takes no longer than a pass
            request = replace(request, quick=not request.facts.sentences(topics.EVERY_BATCH))
        if request.equal is EQUAL_PASSES and not request.schedule.startswith(families.FILE):
            request = replace(request, equal=self._equal)
        watch = options.pop("watch", "off")
        inspect.signature(Pipeline).bind(request, **options)
        if options.get("every_batch"):
            request.facts.refuse(topics.EVERY_BATCH)
        if watch not in WATCH_MODES:
            raise ValueError(f"install(watch={watch!r}): give {', '.join(map(repr, WATCH_MODES[:-1]))} or {WATCH_MODES[-1]!r}")
        facts = {"pipeline_watch": watch, "pipeline_schedule": request.schedule}
        Facts(facts, offload=request.offload, pipeline_costs=request.costs).refuse(topics.WATCH)
        options |= {"measure": True} if watch != "off" else {}
        self._request, self._options, self._watch = request, options, CallWatch(watchdog)
        self._slow_of = cache(lambda pipeline: watching(pipeline, watch))
        self._said: set[str] = set()
        self._pipelines: dict[int, Pipeline] = {}
        self._checked: WeakSet[torch.nn.Module] = WeakSet()  # the first chunks of models that can train so
        self._embedding: torch.nn.Parameter | None = None  # of the model that is being built, to which an output layer is tied
        self._boundaries = cache(lambda placement, _group: BoundaryModules(placement))
        self._last_rank: LastRank | None = None

    def install(self) -> None:
        """Take the place of megatron-core's functions, in place of another loop's schedule."""
        patches.install_loop(None if self._request.schedule == STOCK else self)
        checkpoint_failures.install()

    def close(self) -> None:
        """End the watchdog, if there is one; no rank waits for another."""
        self._watch.close()

    def pipeline(self, ranks: int) -> Pipeline:
        """The pipeline on a number of ranks, which a loop with a placement of its own asks for before it builds chunks.

        Raises:
            ValueError: the schedule does not exist on that many; see ``Pipeline``.
        """
        if ranks not in self._pipelines:
            self._pipelines[ranks] = Pipeline(replace(self._request, ranks=ranks), **self._options)
            if self._pipelines[ranks].is_stock:
                self._pipelines[ranks].install()
        return self._pipelines[ranks]

    def placement(self, ranks: int, chunks: int | None) -> Placement | None:
        """The places of stages; None where they are where megatron-core has them, or a model has another number of chunks.

        Args:
            chunks: of the model on each of that many ranks.

        Raises:
            ValueError: see ``pipeline``.
        """
        if ranks == 1 or chunks is None:
            return None
        placement = self.pipeline(ranks).placement
        return None if placement.chunks != chunks or placement == interleaved(ranks, chunks) else placement

    def boundary(self, placement: Placement) -> BoundaryModules:
        """The ends of models on a placement of this loop's own; made once for a pipeline, by all ranks of the world together."""
        return self._boundaries(placement, parallel_state.get_pipeline_model_parallel_group())

    def lay_out(self, config: TransformerConfig, check: Callable[[TransformerConfig], None]) -> None:
        """Add where a placement of this loop's own has the layers of a model with as many chunks.

        Args:
            check: upstream's, which knows interleaved placements only.

        Raises:
            ValueError: the layers cannot be split over the stages.
        """
        before = config.pipeline_model_parallel_layout
        if isinstance(before, PlacementLayout):  # of an earlier call
            config.pipeline_model_parallel_layout = None
        check(config)
        sizes = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
        self._take_chunks(*sizes)
        if config.mtp_standalone and not isinstance(before, PlacementLayout):
            raise ValueError(
                f"pipeline_model_parallel_layout has layers of mtp_num_layers in an earlier stage: {EARLY_PREDICTION}"
            )
        if (placement := self.placement(*sizes)) is None:
            return
        if not isinstance(before, PlacementLayout) or config.num_layers != before.layers:
            given = before is not None and not isinstance(before, PlacementLayout)
            before = PlacementLayout(_stages(config, placement), placement, given)
        config.pipeline_model_parallel_layout = before

    def lay_out_pattern(self, config: TransformerConfig, pattern: str, **known: Any) -> None:
        """Have the stages of a model of letters end where its pattern has ``|``, on a placement of this loop's own; or balance
        them by what letters take, where nothing says where they end.

        Args:
            known: flags of the model that its configuration has not.

        Raises:
            ValueError: the pattern has another number of stages, or is not that of the costs of letters.
        """
        letters, ranks = hybrid.Pattern.of(pattern), config.pipeline_model_parallel_size
        model = balance.Model.by_layer(self._letter_costs, letters) if self._letter_costs else None
        pipeline, layout = self.pipeline(ranks), config.pipeline_model_parallel_layout
        if ranks == 1 or pipeline.placement.chunks != (config.virtual_pipeline_model_parallel_size or 1):
            return  # all letters are on one; or the first iteration refuses the model
        known |= {"num_layers": len(letters.letters), "data_parallel_size": parallel_state.get_data_parallel_world_size()}
        flags = _flags(vars(config), hybrid_layer_pattern=pattern, letter_costs=self._letter_costs, **known)
        balances = balances_letters(flags) and (layout is None or not getattr(layout, "given", True))
        self._balanced = flags if balances else None
        if balances or (isinstance(layout, PlacementLayout) and len(letters.counts) > 1):
            layout = PlacementLayout(stage_layers(flags, pipeline.placement), pipeline.placement)
            config.pipeline_model_parallel_layout = layout
        if model:
            stages = layout.stages if isinstance(layout, PlacementLayout) else stage_layers(flags, pipeline.placement)
            costs = model.cut([stage.count(LayerType.decoder) for stage in stages])
            pipeline.plans.adopt({}, costs, pipeline.plans.memory_limit)

    def _take_chunks(self, ranks: int, chunks: int | None) -> None:
        """Plan for as many chunks as a model has, where the family leaves their number open and the request does not say one."""
        name = self._request.schedule
        if chunks is None or self._request.chunks is not None or name.startswith(families.FILE) or ranks in self._pipelines:
            return
        try:
            families.placement(name, ranks, chunks)
        except families.ChunksDoNotFit:
            return
        self._request = replace(self._request, chunks=chunks)

    def configure(self, config: TransformerConfig) -> None:
        """Have Transformer Engine's linears, where there are any, leave their weight gradients to W.

        Raises:
            ValueError: see ``te_linear.delay_weight_gradients``.
        """
        if te_linear.is_installed() and not config.delay_wgrad_compute:
            te_linear.delay_weight_gradients(config)

    def ties(self, model: LanguageModule, mark: Callable[[LanguageModule], None]) -> bool:
        """Make an output layer and the embedding that it is tied to equal, where both are on one rank.

        Args:
            model: a chunk whose modules exist.
            mark: marks its ends as upstream does.

        Returns:
            False if that is upstream's to do.

        Raises:
            ValueError: they are on two ranks, and upstream has no group of these.
        """
        placement = self._ends_elsewhere(model.config.virtual_pipeline_model_parallel_size)
        if placement is None:
            return False
        mark(model)
        weight = adapter_of(model).shared_weight(model) if model.pre_process or model.post_process else None
        if weight is None:
            return True
        first, last = (placement.home(stage)[0] for stage in (0, placement.last_stage))
        if first != last:
            raise ValueError(
                f"{self.pipeline(placement.ranks).name} has the output layer on rank {last}, and the model ties it to the "
                f"embedding on rank {first}: give it an output layer of its own (share_embeddings_and_output_weights=False), or "
                "take a V"
            )
        if model.pre_process:
            self._embedding = weight
        elif self._embedding is not None:
            weight.data.copy_(self._embedding.data)
        return True

    def follow_embedding(self, chunks: Sequence[torch.nn.Module]) -> bool:
        """As ``ties``, of all chunks, behind a load that has written the embedding alone. Collective over the world."""
        if (placement := self._ends_elsewhere(len(chunks))) is None:
            return False
        self.boundary(placement).follow_embedding(chunks)
        return True

    def _ends_elsewhere(self, chunks: int | None) -> Placement | None:
        """The places of a model's stages if its ends are not on the first and the last rank, where upstream looks for them."""
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        placement = self.placement(ranks, chunks)
        if placement is None or (placement.home(0)[0], placement.home(placement.last_stage)[0]) == (0, ranks - 1):
            return None
        return placement

    def prepare(self, chunk: torch.nn.Module, ddp_config: Any) -> None:
        """Split the backwards of a chunk's linears, before DDP wraps it, which then hears of weight gradients from W.

        With a watchdog the first chunk starts it, collective over the world.

        Raises:
            ValueError: it cannot know where the processes have met.
        """
        if fused := split_chunks([chunk]):
            self._say_once(logging.INFO, fused)
        chunk_marks.mark(unwrap_model(chunk))
        if ddp_config.overlap_grad_reduce and ddp_config.bucket_size is None:
            distributed_data_parallel.mark(chunk, self._buckets)
        self._watch.start()

    @cached_property
    def _buckets(self) -> int | None:
        """Buckets of a chunk, planned for as many microbatches as ranks: their number is known with the first iteration."""
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        buckets = self.pipeline(ranks).plans.buckets(ranks)
        for line in buckets_in_words(buckets, "bucket_size") if torch.distributed.get_rank() == 0 else ():
            print(f" {line}", flush=True)
        return buckets

    def announce(self, lengths: Sequence[Sequence[int]]) -> None:
        """The lengths of a batch that will come: see ``BatchPlans.announce``.

        Raises:
            ValueError: as there; or ``install`` was called without ``every_batch``.
        """
        batches = self.pipeline(parallel_state.get_pipeline_model_parallel_world_size()).batches
        if batches is None:
            raise ValueError("lengths are announced, and no batch is planned: install(..., every_batch=EveryBatch(...))")
        batches.announce(lengths)

    def forward_backward(self, **keywords: Any) -> list[Any]:
        """One iteration, in place of megatron-core's; a number of microbatches is planned when it first comes.

        Raises:
            ValueError: the model was built before ``install``; or an output layer differs from the embedding that it is tied to;
                or as ``Pipeline.forward_backward``.
        """
        call = Call(**keywords)
        pipeline, placement = self.pipeline(call.pipeline.size()), self.placement(call.pipeline.size(), len(call.chunks))
        with self._watch.during(pipeline):
            if not call.forward_only:
                self._check(call, pipeline, placement)
        with self._watch.during(f"planning {counted(call.num_microbatches, 'microbatch')}"):
            pipeline.plans.plan(call.num_microbatches, call.forward_only)
        with self._watch.during(pipeline):
            slow = None if call.forward_only else self._slow_of(pipeline)
            for line in slow.step(pipeline.start_report()) if slow else ():
                if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
                    logging.getLogger(__name__).warning("%s", line.strip())
            reports = pipeline.run(call)
            if placement is not None:
                self._last_rank = self._last_rank or LastRank(placement)
                self._last_rank.bring(reports, call.pipeline)
        return reports

    def _check(self, call: Call, pipeline: Pipeline, placement: Placement | None) -> None:
        """Refuse a model that cannot train so, before its first iteration. Collective over the pipeline."""
        loops.follow(call.config)
        if call.chunks[0] in self._checked:
            return
        if self._letter_costs and not getattr(unwrap_model(call.chunks[0]), "hybrid_layer_pattern", None):
            raise ValueError(
                f"install(costs=...) is of the letters {self._letter_costs.pattern}: give this model costs of stages"
            )
        for number, chunk in enumerate(call.chunks):
            if not distributed_data_parallel.is_marked(chunk):
                raise ValueError(_NOT_PREPARED.format(name=pipeline.name, chunk=number))
        self._watch.start()  # of a loop that was installed when DDP had wrapped the chunks
        gathered = any(getattr(chunk, "parallel_output", True) is False for chunk in unwrap_model(list(call.chunks)))
        replicas = parallel_state.get_data_parallel_world_size()
        self.warn(Facts.of_config(call.config, gathered_logits=gathered, replicas=replicas, chunks=len(call.chunks)))
        if placement is not None:
            _check_tied(call, self.boundary(placement))
        pipeline.meet(call)
        self._checked.add(call.chunks[0])

    def warn(self, facts: Mapping[str, Any] = {}, **known: Any) -> None:
        """Log once each error of megatron-core's own that settings of this loop meet."""
        size = parallel_state.get_tensor_model_parallel_world_size()
        known |= {"core": compat.version(), "tensor_model_parallel_size": size}
        for text in cautions_of(Facts(facts, **known)):
            self._say_once(logging.WARNING, text)

    def _say_once(self, level: int, text: str) -> None:
        """Log a text on the first data-parallel rank."""
        if text not in self._said and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
            self._said.add(text)
            logging.getLogger(__name__).log(level, "%s", text)

    def _equal(self, placement: Placement, vocabulary: Vocabulary | None) -> Sequence[StageCosts]:
        stages: Sequence[StageCosts] = (EQUAL_PASSES.share(placement.chunks),) * placement.depth
        if self._balanced and self._request.memory_limit is None:  # which is in microbatches, as if stages were equal
            stages = equal_stages(self._balanced, EQUAL_PASSES, placement, vocabulary)
        return stages


def _stages(config: TransformerConfig, placement: Placement) -> Sequence[Sequence[LayerType]]:
    """Contents of every stage in the model's order, from a configuration that upstream has checked."""
    if (layout := config.pipeline_model_parallel_layout) is not None:  # of as many stages, in this order
        return [row[chunk] for chunk in range(placement.chunks) for row in layout.layout]
    return stage_layers(_flags(vars(config)), placement)


def _flags(config: Mapping[str, Any], **known: Any) -> Settings:
    """Flags of a model, from megatron-core's configuration of it and what else is known; one that says no layout."""
    ours = {
        "hybrid_layer_pattern": None,
        "mtp_num_layers": config.get("mtp_num_layers"),
        "pipeline_model_parallel_layout": None,
        "decoder_first_pipeline_num_layers": config.get("num_layers_in_first_pipeline_stage"),
        "decoder_last_pipeline_num_layers": config.get("num_layers_in_last_pipeline_stage"),
        "account_for_embedding_in_pipeline_split": config.get("account_for_embedding_in_pipeline_split"),
        "account_for_loss_in_pipeline_split": config.get("account_for_loss_in_pipeline_split"),
        "num_experts": config.get("num_moe_experts"),
        "swiglu": config.get("gated_linear_unit", False),
        "group_query_attention": True,
        "pipeline": PipelineSettings(),
        "vocabulary": VocabularySettings(),
        "steps": StepSettings(),
    }
    return Settings(**{name: value for name, value in config.items() if value is not None} | ours | known)


def _check_tied(call: Call, boundary: BoundaryModules) -> None:
    """Refuse a model whose output layer is tied to the embedding, and has other weights. Collective over the pipeline."""
    differ = torch.tensor(boundary.differ(call.chunks), dtype=torch.int32, device=call.device)
    torch.distributed.all_reduce(differ, torch.distributed.ReduceOp.MAX, group=call.pipeline)
    if differ:
        raise ValueError(
            "the output layer is tied to the embedding, and their weights differ, as where a checkpoint was loaded into one of "
            "them: load it into both, which a V has on the first pipeline rank, or take a schedule with one chunk per rank"
        )
