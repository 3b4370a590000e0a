"""One run of a script of Megatron-LM's under our schedules: from its flags to its last iteration.

Every method is called by a patch of ``megatron.training`` in place of an upstream function, which it gets as ``original``, in the
order in which they stand here. Under ``--pipeline-schedule stock`` each calls the original and changes nothing; there, too, one
run alone saves into a directory.
"""

from __future__ import annotations

import argparse
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from megatron.pipeline.patches import distributed_data_parallel, language_module, training_training
from megatron.pipeline.patches import schedules as schedules_patch
from megatron.pipeline.patches.upstream_args import write

from megatron.pipeline.flags.config import can_free_outputs, microbatch_counts
from megatron.pipeline.flags.facts import of_flags
from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.launch import checkpoint
from megatron.pipeline.launch.ahead import StepsAhead
from megatron.pipeline.launch.check import check_flags, check_model, check_plan, complete, hidden, separates_documents, untested
from megatron.pipeline.launch.parser import extend, refusing
from megatron.pipeline.launch.progress import LaunchProgress, is_last_rank
from megatron.pipeline.launch.versions import Versions
from megatron.pipeline.model import te_linear
from megatron.pipeline.model.adapter import GPTAdapter, adapter_of
from megatron.pipeline.model.boundary import BoundaryModules
from megatron.pipeline.model.build import LowPrecision
from megatron.pipeline.model.description import shape_of
from megatron.pipeline.model.layout import PlacementLayout, stage_layers
from megatron.pipeline.model.seeding import kept_random_states
from megatron.pipeline.model.split_linear import split_chunks
from megatron.pipeline.model.stage import Stage
from megatron.pipeline.model.vocabulary.shard import shard_vocabulary
from megatron.pipeline.planner import STOCK, topics
from megatron.pipeline.runtime.packing import Packing
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.session import save_lock
from megatron.pipeline.session.call_watch import watching
from megatron.pipeline.session.checkpoints import FORMAT, name_of
from megatron.pipeline.session.last_rank import LastRank
from megatron.pipeline.session.planning import as_planned, plan_pipeline
from megatron.pipeline.session.startup_lines import buckets_in_words, plan_in_words

_NOT_OF_A_STAGE = (  # flags that the layout of a placement stands for, or that upstream's own order of passes would need
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "delay_wgrad_compute",
    "overlap_moe_expert_parallel_comm",
)  # fmt: skip


class Run:
    """State of one run.

    Attributes:
        pipeline: which schedule it uses; None until flags are complete.
        unasked: the flags with their defaults.
    """

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._printed: list[str] = []
        self.unasked = Namespace()
        self.pipeline: Pipeline | None = None
        self._ours = Settings()  # of no flags, until they are complete
        self._buckets: int | None = None  # into which the plan cuts a chunk's parameters, where flags leave that open
        self._cut: PlacementLayout | None = None
        self._progress: LaunchProgress | None = None
        self._ahead: StepsAhead | None = None
        self._packing: Packing | None = None
        self._config: Any = None  # of the training, once it has begun

    @property
    def _placed(self) -> Pipeline | None:
        """The pipeline, if it is not megatron-core's own."""
        return None if self.pipeline is None or self.pipeline.is_stock else self.pipeline

    def pretrain(self, original: Callable[..., Any], *rest: Any, **options: Any) -> Any:
        """All of a training; at its end other runs may save where it has saved."""
        try:
            return original(*rest, **options)
        finally:
            save_lock.release(getattr(self._ours, "save", None))

    # flags

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add ours to Megatron-LM's, and let ``--config FILE`` supply both kinds."""
        extend(parser, self._say)
        self.unasked = Namespace(**{action.dest: action.default for action in parser._actions})

    def _say(self, lines: Iterable[str], everywhere: bool = False) -> None:
        """Print lines once, on the first rank: upstream parses its flags several times.

        Args:
            everywhere: on this rank, whichever it is.
        """
        for line in lines if everywhere or os.environ.get("RANK", "0") == "0" else ():
            if line not in self._printed:
                print(f" {line}", flush=True)
                self._printed.append(line)

    def validate(self, original: Callable[..., Any], args: Namespace, *rest: Any, **options: Any) -> Any:
        """Validate as upstream does, except for what a placement decides: how many chunks and layers a rank has."""
        with refusing():
            check_flags(args)
        stock = args.pipeline_schedule == STOCK
        notes = untested(args, self.unasked)
        if not stock and checkpoint.save_by_parameter(args):
            notes.append("--dist-ckpt-optim-fully-reshardable is on: checkpoints can be loaded under any schedule")
        if not stock and args.overlap_grad_reduce:
            notes.append("every pipeline rank reduces gradients in buckets, within its passes, as with --no-align-grad-reduce")
        if args.post_validation and not stock:  # stock's own refusal follows
            write(args, barrier_with_L1_time=False, rerun_mode="disabled")
            notes.append("--rerun-mode disabled is on: --post-validation runs no iteration again that has ended")
        if not (stock or not args.save or args.exit_signal_handler or getattr(args, "exit_signal_handler_for_training", False)):
            write(args, exit_signal_handler=True)
            notes.append("--exit-signal-handler is on: after SIGTERM the running iteration ends, and a checkpoint is saved")
        self._say(notes)
        with nullcontext() if stock else hidden(args):
            result = original(args, *rest, **options)
        if stock:
            self._say(f"WARNING: {wrong}" for wrong in of_flags(args).sentences(topics.DOCUMENTS))
        return result

    def plan(self, args: Namespace) -> None:
        """Plan every iteration; flags are complete, and no process group exists yet."""
        with refusing():
            settings = complete(args)
            self.pipeline = pipeline = plan_pipeline(settings)
            self._ours = settings = as_planned(settings, pipeline)
            checkpoint.check_placement(settings, pipeline.placement)
            if not pipeline.is_stock:
                check_plan(settings, pipeline, microbatch_counts(settings))
                self._buckets = self._planned_buckets(args, pipeline)
                layers = stage_layers(settings, pipeline.placement)
                self._cut = PlacementLayout(layers, pipeline.placement)
                several = pipeline.placement.chunks if pipeline.placement.chunks > 1 else None
                fused = settings.masked_softmax_fusion
                write(args, virtual_pipeline_model_parallel_size=several, masked_softmax_fusion=fused)
                write(args, pipeline_placement=pipeline.placement.stages)
        pipeline.install()
        if not pipeline.is_stock:
            schedules_patch.use(partial(self._forward_backward, pipeline, LastRank(pipeline.placement)))

    def _planned_buckets(self, args: Namespace, pipeline: Pipeline) -> int | None:
        """Buckets of a chunk as planned; None where the user gives their size, or checkpoints are by bucket of DDP's size."""
        given = args.ddp_bucket_size or getattr(args, "ddp_num_buckets", None) or not args.overlap_grad_reduce
        if given or (args.use_distributed_optimizer and args.save and not args.dist_ckpt_optim_fully_reshardable):
            return None
        buckets = pipeline.plans.buckets(max(microbatch_counts(self._ours)))
        self._say(buckets_in_words(buckets, "--ddp-bucket-size"))
        return buckets

    # the model

    def configure(self, original: Callable[..., Any], args: Namespace, *rest: Any, **options: Any) -> Any:
        """The transformer's configuration, cut by the placement. In training it is made once: scripts ask for it with every
        microbatch, and making one takes 0.2 to 0.3 ms."""
        if self._cut is None or self._progress is None or rest or options:
            return self._configured(original, args, *rest, **options)
        if self._config is None:
            self._config = self._configured(original, args)
        return self._config

    def _configured(self, original: Callable[..., Any], args: Namespace, *rest: Any, **options: Any) -> Any:
        if self._cut is None:
            config = original(args, *rest, **options)
            config.deallocate_pipeline_outputs &= can_free_outputs(args.virtual_pipeline_model_parallel_size or 1)
            return config
        counts = dict.fromkeys(("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"))
        cut = vars(args) | dict.fromkeys(_NOT_OF_A_STAGE, False) | counts | {"pipeline_model_parallel_layout": self._cut}
        config = original(Namespace(**cut), *rest, **options)  # what is saved in checkpoints stays as the user gave it
        # Set late: the constructor would demand several chunks per rank, as megatron-core's own order of passes does.
        config.overlap_moe_expert_parallel_comm = args.overlap_moe_expert_parallel_comm
        if args.transformer_impl == "transformer_engine":
            te_linear.delay_weight_gradients(config)
        return config

    def build(self, make: Callable[[Any, Any], Any], provider: Callable[..., Any]) -> Any:
        """Build this rank's chunks where the placement has them, with linears whose backward splits.

        Args:
            make: calls upstream's function, with a function that builds one chunk, and one ``(config, chunk)`` that wraps a chunk
                in lower precision; with None it leaves upstream's wrapper, and weight gradients are not delayed.
            provider: builds one chunk, as the script has it.
        """
        with refusing():
            save_lock.take(self._ours.save)
        pipeline = self._placed
        if pipeline is None:
            return make(provider, None)
        placement, rank = pipeline.placement, parallel_state.get_pipeline_model_parallel_rank()
        stages = [Stage(placement, rank, chunk) for chunk in range(placement.chunks)]
        models: list[Any] = []

        def provide(*groups: Any, pre_process: bool = True, post_process: bool = True, **given: Any) -> Any:
            stage = stages[len(models)]
            models.append(provider(*groups, pre_process=stage.first, post_process=stage.last, **given))
            with refusing():
                check_model(models[-1], pipeline)
            if len(models) == len(stages):
                self._complete(models, stages)
            return models[-1]

        def low_precision(config: Any, model: Any) -> Any:
            return LowPrecision(config, model, stages[models.index(model)], self._shards_vocabulary)

        with language_module.boundary_weights_marked():
            chunks = make(provide, low_precision)
        boundary = BoundaryModules(placement)
        boundary.tie(chunks)
        training_training.finalize_with(boundary.finalize_model_grads)
        return chunks

    @property
    def _shards_vocabulary(self) -> bool:
        return self._ours.vocabulary.spread is not None

    def _complete(self, models: list[Any], stages: list[Stage]) -> None:
        """Finish this rank's chunks, after the script has built the last of them."""
        if self._shards_vocabulary:
            with kept_random_states():
                shard_vocabulary(self._ours, models[0].config, models, stages)
        fused = split_chunks(models, self._ours.pipeline.recompute_fused_backward)
        for model in models if self._buckets else ():
            distributed_data_parallel.mark(model, self._buckets)
        if fused and (is_last_rank() or torch.distributed.get_rank() == 0):  # they have the first and the last stage
            self._say([f"rank {torch.distributed.get_rank()}: {fused}"], everywhere=True)

    # the data

    def needs_data(self, original: Callable[..., bool], vp_stage: int | None) -> bool:
        """Tell whether a chunk reads microbatches."""
        pipeline = self._placed
        if pipeline is None:
            return original(vp_stage)
        stage = Stage(pipeline.placement, parallel_state.get_pipeline_model_parallel_rank(), vp_stage or 0)
        return stage.first or stage.last or separates_documents(self._ours) or (self._shards_vocabulary and not vp_stage)

    @property
    def shares_whole_batches(self) -> bool:
        """Tell whether tensor-parallel ranks need all of a batch, not what the first or the last rank alone would use."""
        pipeline = self._placed
        return pipeline is not None and (
            self._shards_vocabulary
            or separates_documents(self._ours)
            or pipeline.placement.home(pipeline.placement.last_stage)[0] == 0
        )

    # iterations

    def train(self, original: Callable[..., Any], training: Any, *rest: Any, **options: Any) -> Any:
        """The training loop, in which a rank that fails or hangs ends all, with a message that says where each was."""
        pipeline, ours = self.pipeline, self._ours
        assert pipeline is not None, "flags are validated before training"
        if is_last_rank():
            words = plan_in_words(ours, pipeline, pipeline.is_stock or all(map(_has_formulas, unwrap_model(rest[1]))))
            print(f" {self._versions.in_words}\n schedule {pipeline.name}", *words, sep="\n", flush=True)
        guard: AbstractContextManager[object] = nullcontext()
        if not pipeline.is_stock:  # upstream's own schedules do not say where they are
            guard = watching(ours, lambda: pipeline.situation)
        self._progress = LaunchProgress(ours, pipeline)
        if ours.pipeline_packing:
            batches, shape = pipeline.batches, shape_of(ours)
            announce = batches.announce if batches else None
            self._packing = Packing(shape.tokens, pipeline.placement.ranks, shape.attention_share, announce)
        if ours.steps.ahead:
            self._ahead = StepsAhead(ours, training, pipeline, rest[2], measures=self._progress.measures)
        with guard, self._progress:
            return original(*rest, **options)

    def _forward_backward(self, pipeline: Pipeline, last_rank: LastRank, **options: Any) -> list[Any]:
        """An iteration; what the loss function reported is then on the last rank as well, where upstream looks for it."""
        if self._ahead and not options.get("forward_only"):
            self._ahead.begins(options)
        if self._packing:
            options = self._packing.packed(options)
        reports = pipeline.forward_backward(**options)
        last_rank.bring(reports, parallel_state.get_pipeline_model_parallel_group())
        return reports

    def step(self, original: Callable[..., Any], training: Any, *rest: Any, **options: Any) -> Any:
        """Run one training iteration, and record and report it."""
        began = time.perf_counter()
        result = original(*rest, **options)
        seconds = time.perf_counter() - began
        if self._progress:
            taken = self._ahead.taken if self._ahead else None
            self._progress.step(training.get_args(), result, optimizer=rest[3], seconds=seconds, taken=taken)
        return result

    def agreed(self, original: Callable[..., Any], *rest: Any, **options: Any) -> Any:
        """A number that upstream reduces over the ranks of a model."""
        return self._ahead.agreed(original, *rest, **options) if self._ahead else original(*rest, **options)

    def decide_exit(self, original: Callable[..., bool], *rest: Any, **options: Any) -> bool:
        """Save a checkpoint or exit, where it is time to."""
        return self._ahead.decide_exit(original, *rest, **options) if self._ahead else original(*rest, **options)

    # checkpoints

    def load(self, original: Callable[..., Any], *rest: Any, **options: Any) -> Any:
        """Load a checkpoint."""
        with checkpoint.reading(checkpoint.latest(self._ours)):
            return original(*rest, **options)

    def check_read(self, state: dict[str, Any] | None, path: str, _release: bool, kind: Any) -> None:
        """Refuse what was read for this rank, if other chunks wrote it; ``torch_dist``, upstream's GLOBAL, fits any.

        Args:
            state: None where there is no checkpoint.
        """
        if self.pipeline is not None and state is not None and kind.name != "GLOBAL":
            checkpoint.check_chunks(self._ours, self.pipeline.placement, state, path)

    def save(self, original: Callable[..., Any], iteration: int, *rest: Any, **options: Any) -> Any:
        """Save a checkpoint, unless another run has taken the directory over."""
        from megatron.training import get_args

        save_lock.take(self._ours.save)
        args = get_args()
        elsewhere = options.get("non_persistent_ckpt") or getattr(args, "async_save", False)  # or later
        path, form = Path(args.save) / name_of(iteration), getattr(args, "ckpt_format", FORMAT)
        with nullcontext() if elsewhere else checkpoint.replacing(path, form):
            return original(iteration, *rest, **options)


def _has_formulas(chunk: Any) -> bool:
    """Tell whether the formulas of memory are for a chunk: of megatron-core's models, in 16 or 32 bits."""
    return isinstance(adapter_of(chunk), GPTAdapter) and not chunk.config.fp8
