"""megatron.core.optimizer.distrib_optimizer: the distributed optimizer's step, and its checkpoints.

``DistributedOptimizer.step_with_ready_grads``: where weights are gathered during forwards, upstream steps all of them, and the
first gather begins with the next iteration. Of chunks that train under our schedules each bucket is gathered as soon as it has
been stepped, in the order in which forwards take them, while the next one is stepped. A step is computed weight by weight, so its
numbers do not change.
``DistributedOptimizer.sharded_param_state_fully_reshardable``: upstream joins buckets without the padding at their ends, and then
cuts parameters out by offsets that count this padding, so that it saves everything behind the first padded bucket from the wrong
place (mended in its pull request 5077, which no release up to 0.19.0 has). Here the offsets do not count the padding either.
A release that is right about two small parameters is left alone.
``DistributedOptimizer.load_parameter_state_from_fully_reshardable``: refuses a state that was saved so: its main parameters are
not the model's weights.
``DistributedOptimizer.sharded_state_dict``, ``_set_main_param_and_optimizer_states``: torch's own optimizers, which upstream
takes where neither Transformer Engine nor apex is installed. Their state appears in the first step only, so it is made before it
is loaded, or saved before the first step that counts. It also counts the steps of every parameter: upstream saves it with
the groups of parameters, but looks for it among a checkpoint's tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import accumulate, compress
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.pipeline.patches import compat
from megatron.pipeline.patches.distributed_data_parallel import gathered
from megatron.pipeline.patches.torch_checkpoint import CheckpointError
from megatron.pipeline.patches.torch_optimizers import allocate_state, is_torch

from megatron.pipeline.planner import Facts, topics

# Weights are rounded main parameters; another precision since then rounds once more. Anything saved wrong is farther off.
_RELATIVE, _ABSOLUTE = 2**-6, 2**-20
# Lists of weights, by the optimizer's groups of parameters: the model's of 16 and of 32 bits, and shards of each.
_OF_HALF = ("model_float16_groups", "shard_float16_groups", "shard_fp32_from_float16_groups")
_OF_SINGLE = ("model_fp32_groups", "shard_fp32_groups")


class SavedWrongError(CheckpointError):
    """A checkpoint's optimizer state is not that of its weights."""


def install() -> None:
    optimizer = compat.module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    if optimizer.sharded_state_dict.__module__ == __name__:  # installed already
        return
    compat.wrap(optimizer, "step_with_ready_grads", _by_bucket)
    compat.wrap(optimizer, "sharded_state_dict", _with_states)
    compat.wrap(optimizer, "_set_main_param_and_optimizer_states", _keeping_steps)
    compat.wrap(optimizer, "load_parameter_state_from_fully_reshardable", _checked)
    if _counts_padding(optimizer.sharded_param_state_fully_reshardable):
        compat.wrap(optimizer, "sharded_param_state_fully_reshardable", _without_padding)


def _by_bucket(original: Any, optimizer: Any) -> bool:
    """Upstream's step, in which one group of buckets is stepped after another, and each gathered behind it."""
    buffers = [] if _steps_at_once(optimizer) else optimizer.buffers
    everything = {parameter for buffer in buffers for parameter in buffer.param_index_map}
    groups = [group for chunk in optimizer.model_chunks for group in gathered(chunk)] if everything else []
    parts = [(group, part) for group in groups if (part := group.params & everything)]
    if not everything or sum(len(part) for _, part in parts) < len(everything):
        return bool(original(optimizer))
    inner = optimizer.optimizer
    optimizer.optimizer = SimpleNamespace(param_groups=inner.param_groups, step=lambda: _step_each(optimizer, inner, parts))
    optimizer._copy_main_params_to_model_params = lambda: None  # those of each are copied behind its step
    try:
        return bool(original(optimizer))  # once: at each of its timers all ranks wait for each other
    finally:
        optimizer.optimizer = inner
        del optimizer._copy_main_params_to_model_params


def _step_each(optimizer: Any, inner: Any, parts: list[tuple[Any, set[torch.nn.Parameter]]]) -> None:
    """Step groups of buckets, each with the weights of them that an optimizer has, by what it has within."""
    # Apex and Transformer Engine count the steps of all weights of a group at once; newer releases also where it has none.
    before, after = [deepcopy(group.get("step", 0)) for group in inner.param_groups], dict[int, Any]()
    for group, part in parts:
        with _gathered_behind(group), _alone(optimizer, part):  # of which this rank may have no shard; all replicas gather
            for stepped, count in zip(inner.param_groups, before, strict=True):
                if "step" in stepped:
                    stepped["step"] = deepcopy(count)
            inner.step()
            type(optimizer)._copy_main_params_to_model_params(optimizer)
            counted = enumerate(inner.param_groups)
            after |= {number: stepped["step"] for number, stepped in counted if stepped["params"] and "step" in stepped}
    for number, count in after.items():
        inner.param_groups[number]["step"] = count


def _steps_at_once(optimizer: Any) -> bool:
    """Tell whether weights are not gathered during forwards, or the step is more than one of each weight's shard."""
    config, ddp = vars(optimizer.config), vars(optimizer.ddp_config)
    if optimizer.is_stub_optimizer or not ddp["overlap_param_gather"] or ddp["use_megatron_fsdp"]:
        return True
    return any(Facts(config | ddp).found(topics.AT_ONCE))


@contextmanager
def _gathered_behind(group: Any) -> Iterator[None]:
    """A group's weights are stepped while it lasts, and gathered behind it."""
    if group.param_gather_handle is not None:  # no forward has taken these weights since the last step
        group.param_gather_handle.wait()
        group.param_gather_handle = None
    yield
    group.start_param_sync()


@contextmanager
def _alone(optimizer: Any, part: set[torch.nn.Parameter]) -> Iterator[None]:
    """While it lasts an optimizer has these of the model's weights alone."""
    before = {name: getattr(optimizer, name) for name in (*_OF_HALF, *_OF_SINGLE)}
    inner = [group["params"] for group in optimizer.optimizer.param_groups]
    for model, *shards in (_OF_HALF, _OF_SINGLE):
        kept = [[weight in part for weight in weights] for weights in before[model]]
        for name in (model, *shards):
            setattr(optimizer, name, [list(compress(*pair)) for pair in zip(before[name], kept, strict=True)])
    for group, single, half in zip(
        optimizer.optimizer.param_groups, optimizer.shard_fp32_groups, optimizer.shard_fp32_from_float16_groups, strict=True
    ):
        group["params"] = [*single, *half]
    try:
        yield
    finally:
        for name, groups in before.items():
            setattr(optimizer, name, groups)
        for group, shards in zip(optimizer.optimizer.param_groups, inner, strict=True):
            group["params"] = shards


def _counts_padding(cut: Any) -> bool:
    """Tell whether a release's function, given a parameter behind a bucket that ends in padding, reads it from the wrong
    place.
    """
    first, second = torch.zeros(1), torch.zeros(1)
    bucket = SimpleNamespace(grad_data=torch.zeros(2), numel_unpadded=1)
    buffer = SimpleNamespace(buckets=[bucket, bucket], numel_unpadded=2, param_index_map={first: (0, 1, 0), second: (2, 3, 1)})
    joined = {"param": torch.arange(3.0)}  # one more than there is, lest upstream warn
    optimizer = SimpleNamespace(
        buffers=[buffer],
        gbuf_ranges=[{torch.float32: [{}, {}]}],
        get_parameter_state_dp_zero=lambda **_: {0: {torch.float32: joined}},
    )
    model = {name: ShardedTensor.from_rank_offsets(name, data) for name, data in (("first", first), ("second", second))}
    try:
        found = cut(optimizer, model, metadata={})[1]["param"].data
    except (AttributeError, KeyError, TypeError) as error:
        raise RuntimeError(
            "DistributedOptimizer.sharded_param_state_fully_reshardable is not as the patch of its offsets knows it: "
            f"{type(error).__name__}: {error}"
        ) from error
    return bool(found.item() != 1)


def _without_padding(original: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
    """Upstream's, while parameters are where they are once the buckets are joined without the padding at their ends."""
    given = [buffer.param_index_map for buffer in optimizer.buffers]
    for buffer in optimizer.buffers:
        before = padding_before(buffer)
        buffer.param_index_map = {
            parameter: (start - before[bucket], end - before[bucket], bucket)
            for parameter, (start, end, bucket) in buffer.param_index_map.items()
        }
    try:
        return original(optimizer, *args, **options)
    finally:
        for buffer, offsets in zip(optimizer.buffers, given, strict=True):
            buffer.param_index_map = offsets


def padding_before(buffer: Any) -> list[int]:
    """Padding before every bucket of a buffer: the elements at the ends of those before it."""
    padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
    return list(accumulate(padding[:-1], initial=0))


def _checked(original: Any, optimizer: Any, state_dict: dict[int, dict[str, Any]]) -> Any:
    _check_saved_right(optimizer, state_dict)
    return original(optimizer, state_dict)


def _check_saved_right(optimizer: Any, states: dict[int, dict[str, Any]]) -> None:
    """Compare main parameters with the model's weights, which are loaded first.

    Raises:
        SavedWrongError: says what to do.
    """
    config = optimizer.config
    if config.use_precision_aware_optimizer and config.store_param_remainders and config.bf16:
        return  # what is saved then are the bits that the weights do not have
    parameters = [parameter for buffer in optimizer.buffers for parameter in buffer.param_index_map]
    wrong = sum(not _agree(parameter.detach(), states[index]) for index, parameter in enumerate(parameters))
    if wrong:
        raise SavedWrongError(
            f"the checkpoint's optimizer state is not that of its weights, for {wrong} of the {len(parameters)} parameters of a "
            "rank: megatron-core without its pull request 5077 saves the distributed optimizer's state wrong where a bucket ends "
            "in padding. The weights are right: give --no-load-optim, which starts the optimizer anew"
        )


def _agree(weights: torch.Tensor, state: dict[str, Any]) -> bool:
    main = state["param"] if "param" in state else state["fp32_param"]
    if type(weights) is not torch.Tensor:  # quantised
        return True
    main = main.to(weights.device).reshape(weights.shape)
    # The rows by which the vocabulary's padding has grown since then are in no checkpoint: zeros.
    return bool(torch.all((main == 0) | torch.isclose(main.float(), weights.float(), rtol=_RELATIVE, atol=_ABSOLUTE)))


def _with_states(original: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
    if is_torch(optimizer.optimizer):
        allocate_state(optimizer)
    return original(optimizer, *args, **options)


@torch.no_grad()  # upstream forgets it for states by bucket: float32 weights are their own main parameters
def _keeping_steps(original: Any, optimizer: Any, parameter: Any, tensors: Any) -> None:
    if not is_torch(optimizer.optimizer):
        original(optimizer, parameter, tensors)
        return
    group, index = optimizer.model_param_group_index_map[parameter]
    state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][index]]
    step = state.pop("step")
    original(optimizer, parameter, tensors)
    state["step"] = step.clone()  # upstream has given all parameters one counter, which each of their updates would raise
