"""What the judge says of the product: every schedule that trains, recorded on the device model, ends under every setting."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from marked import whole
from pool import Pool
from runtime.layouts import SCHEDULES

from gpu_model.judge import SETTINGS, Setting, judge
from gpu_model.mutations import KEEPS_ALL_THAT_IS_SENT, UNTIED, Mutation, mutated, shapes_first
from gpu_model.recorded import recording, stuck, trained
from gpu_model.trace import At, Item, Post
from megatron.pipeline.planner import planning

EXTRAS = {
    "plain": "",
    "batched": "--pipeline-p2p batched",
    "one barrier": f"--vocab-parallel 2 {UNTIED}",
    "two barriers": f"--vocab-parallel 1 {UNTIED}",
    "interlaced": f"--vocab-parallel interlaced {UNTIED}",
    "offload": "--offload full --offload-min-size 0.1KiB",
    "batched, one barrier": f"--pipeline-p2p batched --vocab-parallel 2 {UNTIED}",
}


# Every extra once, some on 4 ranks; of all schedules test_symbolic.py has the programs.
DAILY = [
    (2, "zb-h1", "plain"),
    (2, "gis", "batched"),
    (4, "zb-v", "one barrier"),
    (2, "v-half", "two barriers"),
    (4, "1f1b", "interlaced"),
    (2, "dualpipe-v", "offload"),
    (2, "zb-auto", "batched, one barrier"),
]
EVERY = [
    (ranks, schedule, extra)
    for ranks in (2, 4, 8)
    for schedule in SCHEDULES
    for extra in EXTRAS
    if schedule != "seq-1f1b" or extra in ("plain", "batched")
]
assert {*DAILY} <= {*EVERY}


@pytest.mark.parametrize(("ranks", "schedule", "extra"), [case if case in DAILY else whole(*case) for case in EVERY])
def test_ranks_end_together(gpus: Pool, ranks: int, schedule: str, extra: str) -> None:
    flags = f"--num-layers {2 * ranks} {EXTRAS[extra]}".split()
    assert stuck(gpus.run(ranks, trained, schedule, pp=ranks, microbatches=5, iterations=2, flags=tuple(flags))) == []


def of_any_length(schedule: str, **given: Any) -> list[Item]:
    with shapes_first():
        return trained(schedule, **given)


def test_messages_that_say_their_shape_first_end(gpus: Pool) -> None:
    """Their buffers are posted late, when the shape is there: still in the order of the program, for one hardware queue."""
    flags = f"--num-layers 4 {EXTRAS['batched, one barrier']}".split()
    assert stuck(gpus.run(2, of_any_length, "zb-v", pp=2, microbatches=4, iterations=1, flags=tuple(flags))) == []


def iteration(schedule: str, mutation: Mutation | None = None) -> tuple[list[Item], int]:
    """The trace of one with its memory, and the bytes of activations that the recorder counted."""
    import tiny_gpt

    run = tiny_gpt.Run(schedule, pp=2, microbatches=8)
    run.step(0)
    run.pipeline.report()
    with mutated(mutation) if mutation else nullcontext(), recording(memory=True) as trace:
        run.forward_backward(1)
    report = run.pipeline.report()
    assert report is not None
    return trace, report.peak_activation_bytes[torch.distributed.get_rank()]


@pytest.fixture(scope="module")
def equal_zb_v(tmp_path_factory: pytest.TempPathFactory) -> str:
    """ZB-V of equal stages: with its logits a model as small as the test's would run W sooner."""
    path = tmp_path_factory.mktemp("judged") / "zb-v.json"
    path.write_text(planning.plan("zb-v", 2, 8).to_json())
    return f"file:{path}"


@pytest.fixture(scope="module")
def zb_v(gpus: Pool, equal_zb_v: str) -> tuple[list[list[Item]], list[int]]:
    traces, peaks = zip(*gpus.run(2, iteration, equal_zb_v), strict=True)
    return list(traces), list(peaks)


def test_a_wrong_order_is_reported_with_its_cycle(zb_v: tuple[list[list[Item]], list[int]]) -> None:
    """Rank 0 posts what it sends and receives from behind: on one hardware queue a second receive stands behind one whose sender
    waits for what rank 0 posts later."""
    [own, other], _ = zb_v
    wrong = list(own)
    program = next(at for at, item in enumerate(wrong) if isinstance(item, At))
    messages = [at for at in range(program, len(wrong)) if _is_message(wrong[at])]
    for at, item in zip(messages, [wrong[at] for at in reversed(messages)], strict=True):
        wrong[at] = item
    found = judge([wrong, other], SETTINGS["one queue"]).deadlock
    assert {line.split(" waits")[0] for line in found} == {"rank 0", "rank 1"}, found
    for part in ("rank 0 waits for recv 1", "rank 1 waits for", "(runtime/p2p.py:", " of microbatch ", " from stage "):
        assert any(part in line for line in found), (part, found)


def test_a_wrong_order_of_reductions_and_gathers_is_reported(gpus: Pool) -> None:
    """Two replicas of two stages: one begins the first gather behind its step before its last reduction."""
    flags = "--num-layers 4 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 4096"
    traces = gpus.run(4, trained, "zb-v", pp=2, microbatches=4, iterations=2, flags=tuple(flags.split()))
    assert stuck(traces) == []
    wrong = list(traces[0])
    parts = {at: item.parts[0].what for at, item in enumerate(wrong) if isinstance(item, Post)}
    first = min(at for at, what in parts.items() if what == "all_gather" and "distrib_optimizer" in wrong[at].place)
    last = max(at for at, what in parts.items() if what == "reduce_scatter" and at < first)
    wrong[first], wrong[last] = wrong[last], wrong[first]
    assert any("all_gather" in line and "reduce_scatter" in line for line in stuck([wrong, *traces[1:]]))


def _is_message(item: Item) -> bool:
    return isinstance(item, Post) and item.what in ("send", "recv")


def test_hosts_lead_by_an_iteration_and_few_receives_wait(zb_v: tuple[list[list[Item]], list[int]]) -> None:
    """No pass waits for the host; and a receive is posted no earlier than needed."""
    traces, _ = zb_v
    verdict = judge(traces, Setting(one_queue=True, launches=None))
    operations = [sum(isinstance(item, At) for item in trace) for trace in traces]
    assert all(lead > 0.5 * many for lead, many in zip(verdict.lead, operations, strict=True)), (verdict.lead, operations)
    assert all(max(waiting for _, waiting in receives) <= 2 for receives in verdict.receives)


def test_memory_is_what_plans_count_and_messages_that_the_host_is_ahead_of(zb_v: tuple[list[list[Item]], list[int]]) -> None:
    """Of a host that waits for each kernel the allocator's peak is that of activations; one that leads also keeps messages that
    are not over (recordStream), of 4096 bytes here."""
    traces, counted = zb_v
    for launches in (1, 1024, None):
        peaks = judge(traces, Setting(launches=launches)).peak
        for trace, peak, activations in zip(traces, peaks, counted, strict=True):
            messages = 0 if launches == 1 else sum(_is_message(item) for item in trace)
            assert 0.97 * activations < peak <= activations + 4096 * messages, (launches, peaks, counted)
    assert judge(traces, Setting(launches=1)).peak < judge(traces).peak


def test_messages_that_are_kept_are_reported(gpus: Pool, equal_zb_v: str, zb_v: tuple[list[list[Item]], list[int]]) -> None:
    """Of a host that waits for each kernel, which has nothing to keep."""
    _, counted = zb_v
    traces, _ = zip(*gpus.run(2, iteration, equal_zb_v, KEEPS_ALL_THAT_IS_SENT), strict=True)
    peaks = judge(list(traces), Setting(launches=1)).peak
    assert all(peak > activations + 4096 for peak, activations in zip(peaks, counted, strict=True)), (peaks, counted)
