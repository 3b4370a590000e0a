"""What older releases of megatron-core lack is given to them here, so that all else is written for the newest one alone.

``process_groups_config.ProcessGroupCollection`` (0.15): 0.14 has a class for each purpose; one that holds any group stands in.
``distributed.finalize_model_grads``: its ``pg_collection`` (0.15) is called ``grad_finalize_pgs`` in 0.14, whose schedules call
``config.finalize_model_grads_func`` so; ``force_all_reduce`` (0.16) is new.
``models.gpt.gpt_layer_specs.get_gpt_decoder_layer_specs`` (0.16): the specification of all layers, of which a stage takes some.
``optimizer.MegatronOptimizer.get_grads_for_grad_norm`` (0.19) is called ``get_main_grads_for_grad_norm`` before.
``optimizer_param_scheduler.get_canonical_lr_for_logging`` (0.16.1): the learning rate of the groups without one of their own.
``datasets.gpt_dataset.MockGPTLowLevelDataset``: made tokens are of the vocabulary, as they are from 0.16 on.
``utils.get_batch_on_this_cp_rank``: ``is_hybrid_cp`` (0.18) is False, and ``cp_group`` (0.16) that of parallel_state.
``TransformerConfig``: settings of later features, as they are when these are not used.

What is there already is left as it is, so that nothing here asks for a version.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from megatron.pipeline.patches import compat

_LATER_SETTINGS = {
    "hybrid_context_parallel": False,
    "fine_grained_activation_offloading": False,
    # 0.14 has switches of these names instead.
    "cuda_graph_impl": property(lambda config: "local" if config.enable_cuda_graph or config.external_cuda_graph else "none"),
}


def install() -> None:
    """Add what is missing. To be called before the other patches, which look for it.

    Raises:
        ImportError: a name that every release from 0.14 to 0.16 has is missing.
    """
    from megatron.core import optimizer_param_scheduler, process_groups_config, utils
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.transformer import TransformerConfig

    _add(process_groups_config, "ProcessGroupCollection", SimpleNamespace)
    _add(optimizer_param_scheduler, "get_canonical_lr_for_logging", _learning_rate)
    if not hasattr(MegatronOptimizer, "get_grads_for_grad_norm"):
        MegatronOptimizer.get_grads_for_grad_norm = MegatronOptimizer.get_main_grads_for_grad_norm
    all_layers = functools.partial(_all_layers, gpt_layer_specs.get_gpt_decoder_block_spec)
    _add(gpt_layer_specs, "get_gpt_decoder_layer_specs", all_layers)
    for name, value in _LATER_SETTINGS.items():
        _add(TransformerConfig, name, value)
    if "is_hybrid_cp" not in inspect.signature(utils.get_batch_on_this_cp_rank).parameters:
        utils.get_batch_on_this_cp_rank = _without_hybrid(utils.get_batch_on_this_cp_rank)
    _finalize_by_newer_names()
    if "vocab_size" not in MockGPTLowLevelDataset.__init__.__code__.co_names:  # later ones keep it, and no tokenizer
        compat.wrap(MockGPTLowLevelDataset, "__getitem__", _of_the_vocabulary)


def _add(owner: ModuleType | type, name: str, value: Any) -> None:
    if not hasattr(owner, name):
        setattr(owner, name, value)


def _finalize_by_newer_names() -> None:
    from megatron.core import distributed
    from megatron.core.pipeline_parallel import schedules

    original = distributed.finalize_model_grads
    known = inspect.signature(original).parameters
    if "force_all_reduce" in known:
        return
    groups_name = next(name for name in ("pg_collection", "grad_finalize_pgs") if name in known)

    def finalize(model: Any, num_tokens: Any = None, pg_collection: Any = None, force_all_reduce: bool | None = False) -> None:
        if force_all_reduce:
            raise ValueError(
                "force_all_reduce needs megatron-core 0.16 or later: leave it out, or pip install 'megatron-core~=0.16.0'"
            )
        original(model, num_tokens, **{groups_name: pg_collection})

    distributed.finalize_model_grads = finalize
    if groups_name == "pg_collection":
        return
    for name in [name for name in vars(schedules) if name.startswith("forward_backward_")]:
        setattr(schedules, name, _finalizing_by_newer_names(getattr(schedules, name), schedules.get_model_config))


def _finalizing_by_newer_names(forward_backward: Callable[..., Any], config_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """One of 0.14's schedules, for a configuration whose function has the newer names."""

    def run(*, model: Any, **options: Any) -> Any:
        config = config_of(model[0] if isinstance(model, list) else model)
        finalize = config.finalize_model_grads_func
        if finalize is None:
            return forward_backward(model=model, **options)
        config.finalize_model_grads_func = lambda chunks, num_tokens, grad_finalize_pgs: finalize(
            chunks, num_tokens, pg_collection=grad_finalize_pgs
        )
        try:
            return forward_backward(model=model, **options)
        finally:
            config.finalize_model_grads_func = finalize

    return run


def _without_hybrid(get_batch: Callable[..., Any]) -> Callable[..., Any]:
    takes_group = "cp_group" in inspect.signature(get_batch).parameters

    def get_batch_on_this_cp_rank(batch: Any, cp_group: Any = None, *, is_hybrid_cp: bool = False) -> Any:
        assert not is_hybrid_cp, "refused: hybrid context parallelism relies on the order of megatron-core's own schedules"
        return get_batch(batch, cp_group) if takes_group else get_batch(batch)

    return get_batch_on_this_cp_rank


def _all_layers(block_spec: Callable[..., Any], config: Any, *args: Any, **options: Any) -> list[Any]:
    """The specification of every layer of the model: of the one stage of a pipeline of one."""
    whole = copy.copy(config)
    whole.pipeline_model_parallel_size, whole.virtual_pipeline_model_parallel_size = 1, None
    whole.pipeline_model_parallel_layout = None
    return list(block_spec(whole, *args, **options).layer_specs)


def _learning_rate(param_groups: list[dict[str, Any]]) -> float | None:
    return next((group.get("lr") for group in param_groups if not group.get("is_decoupled_lr")), None)


def _of_the_vocabulary(original: Callable[..., Any], dataset: Any, index: int) -> Any:
    return original(dataset, index) % dataset.tokenizer.vocab_size
