"""Waits, events and the like, taken out of the product one at a time: what the checker is worth is that it reports each.

``MUTATIONS`` has the statements or the expression, what stands there instead, and a training in which it matters.
"""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias
from unittest.mock import patch


class Mutation(NamedTuple):
    """One change to the product.

    Attributes:
        where: ``module:Class.method`` in megatron.pipeline.
        code: statements or an expression in it that are there once, however they are written.
        instead: what takes its place.
        run: of ``RUNS``.
    """

    where: str
    code: str
    instead: str
    run: str


Around: TypeAlias = Callable[[], AbstractContextManager[None]]
UNTIED = "--untie-embeddings-and-output-weights"
TWO = "--pipeline-model-parallel-size 2"
FOUR = f"{TWO} --tensor-model-parallel-size 2"
PLANS = (
    "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --disable-bias-linear --bf16 "
    "--overlap-moe-expert-parallel-comm"
)
AHEAD = "--post-validation --post-validation-when always"


@contextmanager
def shapes_first() -> Iterator[None]:
    """Every message says its shape before it comes, as with ``variable_seq_lengths``."""
    from megatron.pipeline.runtime.p2p import Channels

    opens = Channels.open.__func__  # type: ignore[attr-defined]

    def opening(cls: type[Channels], pipeline: Any, variable_lengths: bool, **more: Any) -> Channels:
        channels: Channels = opens(cls, pipeline, True, **more)
        return channels

    with patch.object(Channels, "open", classmethod(opening)):
        yield


@contextmanager
def message_beside_pings() -> Iterator[None]:
    """While hops are measured, a receive is posted for a message that is sent afterwards."""
    import torch

    from megatron.pipeline.runtime import profiling

    ping = profiling.ping

    def pinging(*given: Any) -> list[float]:
        group: Any = torch.distributed.new_group()
        asks, number = torch.distributed.get_rank() == 0, torch.zeros(1, device="cuda")
        work = group.recv([number], 1) if asks else None
        seconds = ping(*given)
        (work or group.send([number], 0)).wait()
        return seconds

    with patch.object(profiling, "ping", pinging):
        yield


@contextmanager
def reports_at_once() -> Iterator[None]:
    """A report is read as soon as it is asked for. Later its wait is often behind another of the host's."""
    from megatron.pipeline.monitor.report import PendingReport
    from megatron.pipeline.runtime import pipeline

    start = pipeline.start_gathering

    def starting(*given: Any) -> PendingReport:
        pending = start(*given)
        pending.wait()
        return pending

    with patch.object(pipeline, "start_gathering", starting):
        yield


class Run(NamedTuple):
    """A training; in most some mutation matters.

    Attributes:
        ranks: of it.
        flags: of it.
        around: what is beside it.
    """

    ranks: int
    flags: str
    around: Around = nullcontext


RUNS = {
    "line": Run(2, f"{TWO} --pipeline-schedule zb-h1"),
    "layer plans": Run(4, f"{TWO} --pipeline-schedule zb-h1 {PLANS}"),
    "batched": Run(2, f"{TWO} --pipeline-schedule zb-h1 --pipeline-p2p batched"),
    "measured": Run(2, f"{TWO} --pipeline-schedule zb-h1 --metrics /dev/null"),
    "tensor": Run(4, f"{FOUR} --pipeline-schedule zb-h1"),
    "sequence": Run(4, f"{FOUR} --sequence-parallel --pipeline-schedule v-half"),
    "vocabulary": Run(2, f"{TWO} --pipeline-schedule zb-v --vocab-parallel 2 {UNTIED}"),
    "two barriers": Run(2, f"{TWO} --pipeline-schedule zb-v --vocab-parallel 1 {UNTIED}"),
    "vocabulary, sequence": Run(4, f"{FOUR} --sequence-parallel --pipeline-schedule zb-v --vocab-parallel 2 {UNTIED}"),
    "two barriers, sequence": Run(4, f"{FOUR} --sequence-parallel --pipeline-schedule zb-v --vocab-parallel 1 {UNTIED}"),
    "logits in parts": Run(
        4, f"{FOUR} --sequence-parallel --pipeline-schedule zb-v --vocab-parallel 1 --vocab-logits-limit 1KiB {UNTIED}"
    ),
    "gathers": Run(
        4,
        f"{TWO} --pipeline-schedule zb-v --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--ddp-bucket-size 4096",
    ),
    "offload": Run(2, f"{TWO} --pipeline-schedule zb-v --offload full --offload-min-size 0.1KiB"),
    "copies on the host": Run(2, f"{TWO} --pipeline-schedule zb-h2 {AHEAD} --post-validation-copy host --clip-grad 0.3"),
    "undone": Run(2, f"{TWO} --pipeline-schedule zb-h2 {AHEAD} --clip-grad 0.3"),
    "rotary": Run(
        4, f"{FOUR} --sequence-parallel --position-embedding-type rope --pipeline-schedule zb-v --vocab-parallel 2 {UNTIED}"
    ),
    "offload, undone": Run(2, f"{TWO} --pipeline-schedule zb-v --offload full --offload-min-size 0.1KiB {AHEAD} --clip-grad 0.3"),
    "measured, read at once": Run(2, f"{TWO} --pipeline-schedule zb-h1 --metrics /dev/null", reports_at_once),
    "undone, shapes first": Run(
        2, f"{TWO} --pipeline-schedule zb-h2 --vocab-parallel 2 {UNTIED} {AHEAD} --clip-grad 0.3", shapes_first
    ),
    "profile beside a message": Run(
        2, f"{TWO} --pipeline-schedule zb-v --pipeline-costs profile --train-iters 8", message_beside_pings
    ),
    "profile": Run(2, f"{TWO} --pipeline-schedule zb-v --pipeline-costs profile --train-iters 12"),
    "evaluations": Run(2, f"{TWO} --pipeline-schedule v-half --eval-interval 2 --eval-iters 2"),
    "offload profile": Run(
        2, f"{TWO} --pipeline-schedule zb-v --offload full --offload-min-size 0.1KiB --offload-profile --train-iters 10"
    ),
    "steps ahead": Run(2, f"{TWO} --pipeline-schedule zb-h2 {AHEAD} --clip-grad 0"),
    "16 bits": Run(2, f"{TWO} --pipeline-schedule v-half --bf16 --accumulate-allreduce-grads-in-fp32"),
    "interlaced": Run(2, f"{TWO} --pipeline-schedule 1f1b --vocab-parallel interlaced {UNTIED}"),
    "tied": Run(2, f"{TWO} --pipeline-schedule zb-v --vocab-parallel 2"),
}
_NOTHING, _WAIT, _GATHERED, _REDUCED = "pass", "request.wait()", "gathering.wait()", "reduction.wait()"
_CURRENT = "torch.cuda.current_stream()"
_P2P, _PASSES = "runtime.p2p:Transport", "runtime.vocabulary:VocabularyPasses"
_EMBEDDING, _OUTPUT = "model.vocabulary.input:EmbeddingShard", "model.vocabulary.output:OutputPart"
_COPIES, _STORE, _SNAPSHOT = (
    "runtime.offload.copy_streams",
    "runtime.offload.activations:Store",
    "runtime.optimizer.snapshot:Snapshot",
)
_SHARDS = "statistics, group=self._groups.shards, async_op=True)"
_INTO = f"torch.distributed.all_gather_into_tensor(whole, {_SHARDS}"
_INTO_PARTS = f"torch.distributed.all_gather(list(one.gathered.unbind()), {_SHARDS}"
_BEGINS = "group.start_param_sync()"
MUTATIONS = (
    Mutation(f"{_P2P}.wait", _WAIT, _NOTHING, "line"),
    Mutation(f"{_P2P}.wait", _WAIT, _NOTHING, "batched"),
    Mutation(f"{_PASSES}.finish", "self._works.pop(collective).wait()", "self._works.pop(collective)", "vocabulary"),
    Mutation(f"{_PASSES}.finish", "self._works.pop(collective).wait()", "self._works.pop(collective)", "two barriers"),
    Mutation(f"{_PASSES}._gradient_ready", "statistics.wait()", _NOTHING, "vocabulary"),
    Mutation(f"{_PASSES}._gradient_ready", f"tensor.record_stream({_CURRENT})", _NOTHING, "vocabulary"),
    Mutation(f"{_PASSES}._gradient_ready", f"one.gradient.record_stream({_CURRENT})", _NOTHING, "vocabulary"),
    Mutation(f"{_PASSES}._gradient_ready", "return side_stream(device)", "return nullcontext()", "vocabulary"),
    Mutation(f"{_PASSES}.start", _INTO, _INTO_PARTS, "vocabulary"),
    Mutation(f"{_OUTPUT}.__init__", _GATHERED, _NOTHING, "two barriers, sequence"),
    Mutation(f"{_OUTPUT}.input_gradient", _REDUCED, _NOTHING, "vocabulary, sequence"),
    Mutation(f"{_OUTPUT}.backward", f"if self._logits is None:\n    {_GATHERED}", _NOTHING, "logits in parts"),
    Mutation("backward.linear:SplitLinear.backward", _REDUCED, _NOTHING, "tensor"),
    Mutation("backward.linear:SplitLinear.backward", _REDUCED, _NOTHING, "sequence"),
    Mutation("runtime.layer_plans:_record_use", f"made.record_stream({_CURRENT})", _NOTHING, "layer plans"),
    Mutation("distributed.sequence:Part.whole", _GATHERED, _NOTHING, "sequence"),
    Mutation(
        f"{_COPIES}:_StreamTicket.wait", "torch.cuda.current_stream(self.device).wait_event(self.times[1])", _NOTHING, "offload"
    ),
    Mutation(f"{_COPIES}:CudaCopyStreams._start", "end.record(stream)", _NOTHING, "offload"),
    Mutation(
        f"{_COPIES}:CudaCopyStreams._start", "stream.wait_stream(torch.cuda.current_stream(self.device))", _NOTHING, "offload"
    ),
    Mutation(f"{_SNAPSHOT}.take", f"self._stream.wait_stream({_CURRENT})", _NOTHING, "copies on the host"),
    Mutation(f"{_SNAPSHOT}.take", "self._copied = self._stream.record_event()", _NOTHING, "copies on the host"),
    Mutation(f"{_STORE}.finish_offload", "self._tickets[-1].wait()", _NOTHING, "offload"),
    Mutation(f"{_STORE}.finish_reload", "self._tickets[-1].wait()", _NOTHING, "offload"),
    Mutation(f"{_SNAPSHOT}.ready", f"{_CURRENT}.wait_event(self._copied)", _NOTHING, "copies on the host"),
    Mutation("monitor.report:start_gathering", _WAIT, _NOTHING, "measured, read at once"),
    Mutation(f"{_EMBEDDING}.forward", _REDUCED, _NOTHING, "rotary"),
    Mutation(f"{_EMBEDDING}.backward", _GATHERED, _NOTHING, "rotary"),
    Mutation(f"{_OUTPUT}.backward", f"if self._logits is not None:\n    {_GATHERED}", _NOTHING, "two barriers, sequence"),
    Mutation(f"{_OUTPUT}.backward", _REDUCED, _NOTHING, "two barriers, sequence"),
    Mutation("runtime.executor:Executor.abandon", "self.transport.wait(message)", _NOTHING, "undone, shapes first"),
    Mutation("runtime.ping:_now", f"{_CURRENT}.synchronize()", "torch.cuda.synchronize()", "profile beside a message"),
    Mutation(f"{_STORE}.abandon", "self._tickets[-1].wait()", _NOTHING, "offload, undone"),
    Mutation("patches.distrib_optimizer:_gathered_behind", f"yield\n{_BEGINS}", f"{_BEGINS}\nyield", "gathers"),
    Mutation("distributed.reduction:Reduction.wait", "not self._work.is_completed()", "False", "measured"),
)

# Each has a test of its own, of memory: what the allocator's peak is, what the host waits for, and what is unpinned too early.
KEEPS_ALL_THAT_IS_SENT = Mutation(f"{_P2P}.sweep", "self._finish_first(queue)", "break", "")
NEVER_USED = Mutation(
    "runtime.offload.host_memory:Arena.end_use", f"self._last_use[:] = [{_CURRENT}.record_event()]", _NOTHING, ""
)
UNPINS_AT_ONCE = Mutation("runtime.offload.host_memory:_unpin", "last_use[0].synchronize()", _NOTHING, "")


@contextmanager
def mutated(mutation: Mutation) -> Iterator[None]:
    """The product with one change."""
    module_name, _, path = mutation.where.partition(":")
    module = import_module(f"megatron.pipeline.{module_name}")
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, module)
    original = inspect.getattr_static(owner, name)
    function = getattr(original, "__func__", original)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    times = _replace(tree, ast.parse(mutation.code).body, ast.parse(mutation.instead).body)
    assert times == 1, f"{mutation.where} has {mutation.code!r} {times} times"
    scope: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.fix_missing_locations(tree), str(inspect.getsourcefile(function)), "exec", flags), vars(module), scope)
    _put(owner, name, original, scope[name])
    try:
        yield
    finally:
        _put(owner, name, scope[name], original)


def _replace(tree: ast.AST, old: list[ast.stmt], new: list[ast.stmt]) -> int:
    """Put statements in the place of equal ones, or an expression in that of one; how many times the old is there."""
    times, before, after = 0, list[ast.AST](old), list[ast.AST](new)
    match old, new:
        case [ast.Expr(was)], [ast.Expr(becomes)]:
            before, after = [was], [becomes]
    wanted = [ast.dump(each) for each in before]
    fields = [(parent, name, value) for parent in ast.walk(tree) for name, value in ast.iter_fields(parent)]
    for parent, name, value in fields:
        if isinstance(value, list):
            here = [ast.dump(each) if isinstance(each, ast.AST) else "" for each in value]
            for at in (at for at in range(len(here)) if here[at : at + len(wanted)] == wanted):
                value[at : at + len(wanted)] = after
                times += 1
        elif isinstance(value, ast.AST) and [ast.dump(value)] == wanted:
            setattr(parent, name, after[0])
            times += 1
    return times


def _put(owner: Any, name: str, old: Any, new: Any) -> None:
    """Also where a module has imported it, which may have been since the other way round."""
    setattr(owner, name, new)
    for module in list(sys.modules.values()):
        if vars(module).get(name) is old:
            setattr(module, name, new)
