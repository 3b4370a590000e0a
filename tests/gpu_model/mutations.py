"""Waits, events and the like, taken out of the product one at a time: what the checker is worth is that it reports each.

``MUTATIONS`` names the line, what stands there instead, and a training in which it matters.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple


class Mutation(NamedTuple):
    """One change to the product.

    Attributes:
        where: ``module:Class.method`` in megatron.pipeline.
        line: text in it that stands there once.
        instead: what takes its place.
        run: of ``RUNS``.
    """

    where: str
    line: str
    instead: str
    run: str


STREAM = "self._stream.wait_stream(torch.cuda.current_stream())"
UNTIED = "--untie-embeddings-and-output-weights"
TWO = "--pipeline-model-parallel-size 2"
FOUR = f"{TWO} --tensor-model-parallel-size 2"
AHEAD = "--post-validation --post-validation-when always"
# Ranks, and the flags of a training.
RUNS = {
    "line": (2, f"{TWO} --pipeline-schedule zb-h1"),
    "batched": (2, f"{TWO} --pipeline-schedule zb-h1 --pipeline-p2p batched"),
    "measured": (2, f"{TWO} --pipeline-schedule zb-h1 --metrics /dev/null"),
    "tensor": (4, f"{FOUR} --pipeline-schedule zb-h1"),
    "sequence": (4, f"{FOUR} --sequence-parallel --pipeline-schedule v-half"),
    "vocabulary": (2, f"{TWO} --pipeline-schedule zb-v --vocab-parallel 2 {UNTIED}"),
    "two barriers": (2, f"{TWO} --pipeline-schedule zb-v --vocab-parallel 1 {UNTIED}"),
    "vocabulary, sequence": (4, f"{FOUR} --sequence-parallel --pipeline-schedule zb-v --vocab-parallel 2 {UNTIED}"),
    "two barriers, sequence": (4, f"{FOUR} --sequence-parallel --pipeline-schedule zb-v --vocab-parallel 1 {UNTIED}"),
    "logits in parts": (
        4,
        f"{FOUR} --sequence-parallel --pipeline-schedule zb-v --vocab-parallel 1 --vocab-logits-limit 1KiB {UNTIED}",
    ),
    "offload": (2, f"{TWO} --pipeline-schedule zb-v --offload full --offload-min-size 0.1KiB"),
    "copies on the host": (2, f"{TWO} --pipeline-schedule zb-h2 {AHEAD} --post-validation-copy host --clip-grad 0.3"),
    "undone": (2, f"{TWO} --pipeline-schedule zb-h2 {AHEAD} --clip-grad 0.3"),
    "profile": (2, f"{TWO} --pipeline-schedule zb-v --pipeline-costs profile --train-iters 12"),
}
_WAIT, _NOTHING = "request.wait()", "pass"
MUTATIONS = (
    Mutation("runtime.p2p:Transport.wait", _WAIT, _NOTHING, "line"),
    Mutation("runtime.p2p:Transport.wait", _WAIT, _NOTHING, "batched"),
    Mutation("runtime.vocabulary:VocabularyPasses.finish", "pop(collective).wait()", "pop(collective)", "vocabulary"),
    Mutation("runtime.vocabulary:VocabularyPasses.finish", "pop(collective).wait()", "pop(collective)", "two barriers"),
    Mutation("runtime.vocabulary:VocabularyPasses._gradient_ready", "statistics.wait()", _NOTHING, "vocabulary"),
    Mutation(
        "runtime.vocabulary:VocabularyPasses._gradient_ready",
        "tensor.record_stream(torch.cuda.current_stream())",
        _NOTHING,
        "vocabulary",
    ),
    Mutation(
        "runtime.vocabulary:VocabularyPasses._gradient_ready",
        "one.gradient.record_stream(torch.cuda.current_stream())",
        _NOTHING,
        "vocabulary",
    ),
    Mutation(
        "runtime.vocabulary:VocabularyPasses._gradient_ready", "return side_stream(device)", "return nullcontext()", "vocabulary"
    ),
    Mutation(
        "runtime.vocabulary:VocabularyPasses.start",
        "all_gather_into_tensor(whole, ",
        "all_gather(list(one.gathered.unbind()), ",
        "vocabulary",
    ),
    Mutation("model.vocabulary.output:OutputPart.__init__", "gathering.wait()", _NOTHING, "two barriers, sequence"),
    Mutation("model.vocabulary.output:OutputPart.input_gradient", "reduction.wait()", _NOTHING, "vocabulary, sequence"),
    Mutation(
        "model.vocabulary.output:OutputPart.backward",
        "    if self._logits is None:\n        gathering.wait()",
        "",
        "logits in parts",
    ),
    Mutation("backward.linear:SplitLinear.backward", "reduction.wait()", _NOTHING, "tensor"),
    Mutation("backward.linear:SplitLinear.backward", "reduction.wait()", _NOTHING, "sequence"),
    Mutation("backward.linear:WeightGradient.run", "gathering.wait()", _NOTHING, "sequence"),
    Mutation(
        "runtime.offload.copy_streams:_StreamTicket.wait",
        "torch.cuda.current_stream(self.device).wait_event(self.times[1])",
        _NOTHING,
        "offload",
    ),
    Mutation("runtime.offload.copy_streams:CudaCopyStreams._start", "end.record(stream)", _NOTHING, "offload"),
    Mutation(
        "runtime.offload.copy_streams:CudaCopyStreams._start",
        "stream.wait_stream(torch.cuda.current_stream(self.device))",
        _NOTHING,
        "offload",
    ),
    Mutation(
        "optimizer.snapshot:Snapshot.take",
        "self._stream.wait_stream(torch.cuda.current_stream())",
        _NOTHING,
        "copies on the host",
    ),
    Mutation("optimizer.snapshot:Snapshot.take", "self._copied = self._stream.record_event()", _NOTHING, "copies on the host"),
    Mutation("dist.reduction:Reduction.wait", "while not self._work.is_completed():", "while False:", "measured"),
)


@contextmanager
def mutated(mutation: Mutation) -> Iterator[None]:
    """The product with one change."""
    module_name, _, path = mutation.where.partition(":")
    module = import_module(f"megatron.pipeline.{module_name}")
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, module)
    original = inspect.getattr_static(owner, name)
    function = getattr(original, "__func__", original)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutation.line) == 1, f"{mutation.where} has {mutation.line!r} {source.count(mutation.line)} times"
    scope: dict[str, Any] = {}
    changed = f"from __future__ import annotations\n{source.replace(mutation.line, mutation.instead)}"
    exec(compile(changed, str(inspect.getsourcefile(function)), "exec"), vars(module), scope)
    others = [one for one in import_module("sys").modules.values() if vars(one).get(name) is original] if not owners else []
    for place in [owner, *others]:
        setattr(place, name, scope[name])
    try:
        yield
    finally:
        for place in [owner, *others]:
            setattr(place, name, original)
