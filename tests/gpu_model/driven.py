"""An iteration of a tiny GPT, driven by the product's unchanged code on either kind of rank: what each reports of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import NamedTuple
from unittest.mock import patch

from gpu_model import device, fake
from gpu_model.aside import ddp_aside, first_stage_aside, linears_aside
from gpu_model.mutations import UNTIED, Mutation, mutated
from gpu_model.recorded import racing, recording
from gpu_model.shim import EngineDevice
from gpu_model.test_trainer import races
from gpu_model.trace import At, HostWait, Item


class Drive(NamedTuple):
    """What is driven.

    Attributes:
        ranks: of it, 2 of which are a pipeline.
        tp, cp: tensor- and context-parallel ranks.
        around: what is beside it.
    """

    schedule: str
    flags: str = ""
    ranks: int = 2
    tp: int = 1
    cp: int = 1
    around: Callable[[], AbstractContextManager[None]] = nullcontext


class Report(NamedTuple):
    """Of one rank.

    Attributes:
        races: as text.
        reads: places where the host waited for the device, or read it, between the iteration's first operation and its last.
        trace: of the iteration's passes.
        engine: what autograd's engine did with streams: how many events, waits and records of memory; of a training also how
            many steps were rolled back.
        kernels: that were launched.
    """

    races: list[str]
    reads: list[str]
    trace: list[Item]
    engine: Mapping[str, int]
    kernels: int


DRIVES = {
    "line": Drive("zb-h1"),
    "V": Drive("zb-v"),
    "V, one barrier": Drive("zb-v", f"--vocab-parallel 2 {UNTIED}"),
    "V, two barriers": Drive("zb-v", f"--vocab-parallel 1 {UNTIED}"),
    "V, tied": Drive("v-half", "--vocab-parallel 2"),
    "offload": Drive("zb-v", "--offload full --offload-min-size 0.1KiB"),
    "recomputed": Drive("zb-h1", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "slices": Drive("seq-1f1b"),
    "interleaved": Drive("interleaved"),
    "interlaced": Drive("1f1b", f"--vocab-parallel interlaced {UNTIED}"),
    "batched, dropout": Drive("zb-h1", "--pipeline-p2p batched --attention-dropout 0.1 --hidden-dropout 0.1"),
    "16 bits, rotary": Drive("v-half", "--bf16 --accumulate-allreduce-grads-in-fp32 --position-embedding-type rope"),
    "sequence": Drive("zb-v", f"--sequence-parallel --vocab-parallel 2 {UNTIED}", 4, tp=2),
    "contexts": Drive("zb-h1", ranks=4, cp=2),
    "distributed optimizer": Drive("zb-v", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 4),
    "linears aside": Drive("zb-h1", around=linears_aside),
    "linears aside, sequence": Drive("zb-h1", "--sequence-parallel", 4, tp=2, around=linears_aside),
    "first stage aside": Drive("zb-v", f"--vocab-parallel 2 {UNTIED}", around=first_stage_aside),
    "DDP aside": Drive("zb-h1", "--overlap-grad-reduce", around=ddp_aside),
    "DDP aside, fused": Drive("1f1b", "--overlap-grad-reduce --ddp-bucket-size 4096", around=ddp_aside),
}
_PART = "sequence.Part.of({}, row.gathered_by if row and deferred else None)"
# Forwards have all waits that they need; a backward leaves something that the next pass takes without one.
MUTATIONS: dict[str, tuple[str, Mutation]] = {
    "a copy of the caught gradient": (
        "first stage aside",
        Mutation("runtime.vocabulary:_Catch.backward", "ctx.caught.append(gradient)", "ctx.caught.append(gradient.clone())", ""),
    ),
    "a copy of the output's gradient": (
        "linears aside",
        Mutation("backward.linear:SplitLinear.backward", _PART.format("grad_output"), _PART.format("grad_output.clone()"), ""),
    ),
    "an input that is gathered for W": (
        "linears aside, sequence",
        Mutation("backward.linear:SplitLinear.backward", "not deferred", "True", ""),
    ),
}
_BIAS = "grad_bias = grad_output.flatten(0, -2).sum(dim=0) if ctx.use_bias else None"
READ = Mutation("backward.linear:SplitLinear.backward", _BIAS, f"assert grad_output.isfinite().all()\n{_BIAS}", "")
# What autograd's engine does itself, taken out.
ENGINE = ("_follows", "_uses")


def drive(name: str, mutation: str | None = None, without: str | None = None) -> Report:
    """One iteration, and the step behind it.

    Args:
        mutation: of ``MUTATIONS``, or "a read".
        without: what the engine is not to do, of ``ENGINE``.
    """
    import tiny_gpt

    schedule, flags, _, tp, cp, around = DRIVES[name]
    one = device()
    with ExitStack() as stack:
        if isinstance(one, EngineDevice):  # by the second way
            stack.enter_context(fake.driven(one))
            one.begin(without)
        races = stack.enter_context(racing())
        if mutation:
            stack.enter_context(mutated(READ if mutation == "a read" else MUTATIONS[mutation][1]))
        stack.enter_context(around())
        run = tiny_gpt.Run(schedule, pp=2, tp=tp, cp=cp, microbatches=4, flags=tuple(flags.split()))
        for chunk in run.chunks:
            chunk.zero_grad_buffer()
        before = one.kernels
        with recording() as trace:
            run.forward_backward(0)
        kernels = one.kernels - before
        run.optimizer.step()
    program = [at for at, item in enumerate(trace) if isinstance(item, At)]
    reads = [item.place for item in trace[program[0] : program[-1]] if isinstance(item, HostWait)]
    return Report(races, reads, trace, one.did() if isinstance(one, EngineDevice) else {}, kernels)


# With the training loop and the optimizer: what else is driven, and whether norms are such that steps are rolled back.
TRAININGS = {
    "steps ahead": ("--pipeline-schedule zb-h2 --post-validation --post-validation-when always --clip-grad 0.3", False),
    "rolled back": ("--pipeline-schedule zb-h2 --post-validation --post-validation-when always --clip-grad 0.3", True),
    "rolled back, from the host": (
        "--pipeline-schedule zb-v --post-validation --post-validation-when always --post-validation-copy host --clip-grad 0.3 "
        f"--vocab-parallel 2 {UNTIED}",
        True,
    ),
    "profile": ("--pipeline-schedule zb-v --pipeline-costs profile --train-iters 8", False),
}


def train(name: str, data: str) -> Report:
    """A training by the second way.

    Returns:
        Reads are those by what passes run.
    """
    from megatron.pipeline.optimizer.snapshot import Snapshot

    one = device()
    assert isinstance(one, EngineDevice)
    flags, rolled_back = TRAININGS[name]
    before, passes = one.kernels, ("runtime/stage_passes.py", "runtime/vocabulary.py", "runtime/p2p.py", "backward/", "model/")
    counted = patch.object(Snapshot, "restore", autospec=True, side_effect=Snapshot.restore)
    ones_for = "optimizer/step_ahead.py" if rolled_back else ""
    with counted as restored, fake.driven(one, ones_for), recording() as trace:
        one.begin()
        found = races(f"{data} --train-iters 4 --pipeline-model-parallel-size 2 {flags}")
    reads = [item.place for item in trace if isinstance(item, HostWait) and item.place.startswith(passes)]
    return Report(found, reads, trace, one.did() | {"restored": restored.call_count}, one.kernels - before)
