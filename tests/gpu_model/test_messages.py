"""What the host does around messages and groups on a GPU: measured hops, timeouts, barriers, first uses of communicators."""

from __future__ import annotations

import os
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock, patch

import pytest
import torch
from marked import whole
from pool import Pool

from gpu_model import cuda, device, nccl
from gpu_model.ranks import another_world
from gpu_model.recorded import recording
from gpu_model.trace import Post
from megatron.pipeline.distributed.groups import few_ctas
from megatron.pipeline.runtime.background import BackgroundPlanner

UNTIED = ("--untie-embeddings-and-output-weights",)


def pinged(variable_lengths: bool) -> list[float]:
    from megatron.pipeline.planner.schedule import families
    from megatron.pipeline.planner.schedule.core.kinds import Flow
    from megatron.pipeline.runtime.p2p import Channels, Transport
    from megatron.pipeline.runtime.ping import ping

    channels = Channels.open(torch.distributed.group.WORLD, variable_lengths)  # type: ignore[arg-type]
    shapes = {Flow.ACTIVATION: [(4, 2)], Flow.GRADIENT: [(4, 2)]}
    transport = Transport(channels, shapes, torch.float32, torch.device("cuda", 0))
    return ping(transport, torch.distributed.get_rank(), families.placement("1f1b", 2))


@pytest.mark.parametrize("variable_lengths", [False, True])
def test_a_hop_is_measured_without_waiting_for_the_answer_of_another(gpus: Pool, variable_lengths: bool) -> None:
    """``torch.cuda.synchronize`` would wait for a posted receive whose sender waits for us; so would a shape that comes first."""
    measured, nothing = gpus.run(2, pinged, variable_lengths, timeout=60)
    assert len(measured) == 5 and nothing == []


def timeouts(minutes: float) -> list[timedelta]:
    """Of all groups that the product makes in a world with a timeout of its own."""
    import tiny_gpt

    another_world(timeout=timedelta(minutes=minutes))
    before = len(nccl.groups())
    flags = ("--untie-embeddings-and-output-weights", "--vocab-parallel", "2", "--distributed-timeout-minutes", str(int(minutes)))
    tiny_gpt.train("zb-v", pp=2, iterations=1, flags=flags)
    return [group.timeout for group in nccl.groups()[before:]]


def test_all_groups_have_the_timeout_of_the_world(gpus: Pool) -> None:
    for found in gpus.run(2, timeouts, 60.0):
        assert set(found) == {timedelta(minutes=60)}


def watched() -> list[tuple[str, bool]]:
    from megatron.pipeline.monitor.progress import Situation
    from megatron.pipeline.monitor.watchdog import Watchdog

    nccl.barriers.clear()
    with Watchdog(Situation):
        pass
    return nccl.barriers


def test_barriers_say_which_device_they_mean(gpus: Pool) -> None:
    """NCCL guesses rank modulo GPUs where nobody says it: another GPU on a node with fewer ranks than GPUs."""
    for found in gpus.run(2, watched):
        assert len(found) == 2 and all(said for _, said in found)


def first_uses(posting: str) -> tuple[int, int]:
    """How many communicators the pipeline's own groups have before the first pass, and after two iterations."""
    import tiny_gpt

    from megatron.pipeline.runtime.executor import Executor

    before, begin, made = len(nccl.groups()), Executor.begin, []

    def count() -> int:
        own = [group for group in nccl.groups()[before:] if any("runtime/" in place for place in group.places)]
        return sum(len(group.communicators) for group in own)

    def counting(executor: Executor) -> None:
        made.append(count())
        begin(executor)

    with patch.object(Executor, "begin", counting):
        flags = ("--untie-embeddings-and-output-weights", "--vocab-parallel", "2", "--pipeline-p2p", posting)
        tiny_gpt.train("zb-v", pp=2, iterations=2, flags=flags)
    return made[0], count()


def test_communicators_are_made_before_the_first_pass(gpus: Pool) -> None:
    """Making one blocks the host until all members come: in the middle of a program that can be a deadlock."""
    for posting in ("single", "batched"):
        for before, after in gpus.run(2, first_uses, posting):
            assert before == after > 2


def streams_of_tensor_groups() -> list[set[str]]:
    """From which streams the tensor-parallel ranks' groups were used, in the iterations."""
    import tiny_gpt
    from megatron.core import parallel_state

    run = tiny_gpt.Run("zb-v", pp=2, tp=2, flags=("--sequence-parallel", "--vocab-parallel", "2", *UNTIED))
    run.step(0)
    for group in nccl.groups():
        group.posted_from.clear()
    run.forward_backward(1)
    mine = tuple(torch.distributed.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group()))
    return [group.posted_from for group in nccl.groups() if tuple(torch.distributed.get_process_group_ranks(group)) == mine]


def test_the_side_stream_has_tensor_parallel_ranks_of_its_own(gpus: Pool) -> None:
    """Otherwise each all-reduce of the passes queues behind a reduce-scatter that waits for all ranks' statistics."""
    for found in gpus.run(4, streams_of_tensor_groups):
        used = [streams for streams in found if streams]
        assert len(used) == 2 and all(len(streams) == 1 for streams in used) and used[0] != used[1], found


def host_waits(directory: str, flags: str) -> list[list[str]]:
    """Where the host waits for the passes' stream, or for all, within each iteration of a training but the first two."""
    from training.short_runs import train

    from megatron.pipeline.runtime.iteration import Iteration

    run, found = Iteration.run, []

    def noting(iteration: Iteration, call: object) -> object:
        device().syncs.clear()
        result = run(iteration, call)  # type: ignore[arg-type]
        found.append([one for one in device().syncs if one.stream in ("compute", "all")])
        return result

    with patch.object(Iteration, "run", noting):
        error = train(f"{directory} {flags}")
    assert not error, error
    return [[Path(one.place.partition(":")[0]).name for one in several] for several in found[2:]]


@pytest.mark.parametrize(
    "flags",
    [
        whole("--pipeline-schedule zb-h1"),
        "--pipeline-schedule zb-v --vocab-parallel 2 --untie-embeddings-and-output-weights",
        "--pipeline-schedule zb-v --offload full --offload-min-size 0.1KiB",
        "--pipeline-schedule zb-h2 --post-validation --post-validation-when always --clip-grad 0",
    ],
)
def test_no_pass_waits_for_the_host(gpus: Pool, data: str, flags: str) -> None:
    """The host runs ahead of the device through all passes of an iteration; then it reads once whether gradients are numbers."""
    for found in gpus.run(2, host_waits, data, f"--pipeline-model-parallel-size 2 {flags}"):
        assert found and all(places == ["rerun_state_machine.py"] for places in found), found


def reads_while_a_plan_is_missing() -> list[str]:
    """Where the host waits for the device, when ranks ask for the second time whether a search is over."""
    planner = BackgroundPlanner(MagicMock())
    with patch.object(planner, "start", lambda *_, **__: Future()):
        planner.search(4)
    planner.adopt_searched()
    device().syncs.clear()
    planner.adopt_searched()
    return [one.place for one in device().syncs]


def test_nobody_reads_the_device_to_learn_that_a_plan_is_missing(gpus: Pool) -> None:
    assert gpus.run(2, reads_while_a_plan_is_missing) == [[], []]


def thread_blocks(file: str | None, *flags: str) -> list[tuple[int, int]]:
    """Of every group that an iteration uses for messages and the vocabulary, where a node has 2 ranks; and how they are grouped.

    Args:
        file: Megatron-LM's --nccl-communicator-config-path.
    """
    import tiny_gpt
    from megatron.core import parallel_state

    before = len(nccl.groups())
    given = partial(parallel_state.initialize_model_parallel, nccl_communicator_config_path=file)
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="2"), patch.object(parallel_state, "initialize_model_parallel", given):
        tiny_gpt.train("zb-v", pp=2, iterations=1, flags=(*UNTIED, "--vocab-parallel", "2", *flags))
    own = [group for group in nccl.groups()[before:] if group.places & {"runtime/p2p.py", "runtime/vocabulary.py"}]
    return [(group.options.config.max_ctas, group.options.config.cga_cluster_size) for group in own]


@pytest.mark.parametrize(
    ("entry", "flags", "found"),
    [
        ("", (), (4, 0)),
        ("", ("--pipeline-max-ctas", "3"), (3, 0)),
        ("pp: {max_ctas: 16, cga_cluster_size: 2}", (), (16, 2)),
        ("pp: {min_ctas: 6}", (), (6, 0)),
        ("pp: {max_ctas: 16, cga_cluster_size: 2}", ("--pipeline-max-ctas", "3"), (3, 2)),
        ("tp: {max_ctas: 16}", (), (4, 0)),
    ],
)
def test_messages_take_no_more_of_a_gpu_than_was_said(
    gpus: Pool, tmp_path: Path, entry: str, flags: tuple[str, ...], found: tuple[int, int]
) -> None:
    """By a flag, else by Megatron-LM's file of NCCL's settings, of which they keep the others."""
    (file := tmp_path / "nccl.yaml").write_text(entry)
    for rank in gpus.run(2, thread_blocks, str(file) if entry else None, *flags):
        assert rank == [found] * 3


def test_messages_between_nodes_have_more_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert [few_ctas(ranks) for ranks in ([8, 10, 12, 14], [0, 4, 8, 12], [7, 8])] == [4, 8, 8]


def buckets(schedule: str) -> list[int]:
    """Of each chunk's gradients."""
    import tiny_gpt

    run = tiny_gpt.Run(schedule, pp=2, flags=("--overlap-grad-reduce", "--ddp-bucket-size", "4096"))
    return [len(chunk.buffers[0].buckets) for chunk in run.chunks]


def test_gradients_of_every_chunk_are_reduced_in_buckets(pool: Pool) -> None:
    for schedule in ("zb-v", "gis"):
        assert all(min(found) > 1 for found in pool.run(2, buckets, schedule))


def gathers() -> list[int]:
    """All-gathers of the weights of a V's chunks: those within an iteration, and those of the step behind it."""
    import tiny_gpt

    flags = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 4096"
    run = tiny_gpt.Run("zb-v", pp=2, flags=(*flags.split(), *UNTIED))
    run.step(0)
    found = []
    for part in (lambda: run.forward_backward(1), run.optimizer.step):
        with recording() as trace:
            part()
        found.append(sum(isinstance(item, Post) and item.what == "all_gather" for item in trace))
    return found


def test_weights_of_every_chunk_of_a_v_are_gathered_in_buckets(gpus: Pool) -> None:
    """All behind the step."""
    assert gpus.run(4, gathers) == [[0, 8]] * 4


def streams_made(directory: str) -> tuple[int, int]:
    """How many streams there are after a few measured iterations, and after some more."""
    from training.short_runs import train

    from megatron.pipeline.monitor import recorder

    made, reach = [], recorder._reached_now

    def reaching() -> object:
        event = reach()
        made.append(next(cuda._numbers))
        return event

    with patch.object(recorder, "_reached_now", reaching):
        error = train(f"{directory} --pipeline-model-parallel-size 2 --metrics /dev/null")
    assert not error, error
    return made[1], made[-1]


def test_reports_make_no_new_streams(gpus: Pool, data: str) -> None:
    """torch has 32, NCCL's among them: a report would one day wait for a collective of others."""
    for early, late in gpus.run(2, streams_made, data):
        assert late - early == 4  # the test's own numbers, one for each iteration
