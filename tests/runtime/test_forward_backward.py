"""The keywords, settings and errors of megatron-core's own schedules, under schedules that are data."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import tiny_gpt
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func as imported_early
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.pipeline.patches import schedules
from pool import Pool, RankFailed

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.planning import Request
from megatron.pipeline.runtime.call import Call
from megatron.pipeline.runtime.pipeline import Pipeline

RANKS = 4
DEEP = ("--num-layers", "8", "--clip-grad", "0")  # a layer for every stage of a V; norms have last digits of their own there


def known(found: list[list[Any]]) -> list[Any]:
    """The losses of every step, and other results, on the one rank that has them: the one with the last stage."""
    [steps] = [[step[0] if isinstance(step, tuple) else step for step in steps] for steps in found if steps[0][0] is not None]
    return steps


def signatures() -> tuple[list[str], list[list[str]]]:
    ours = [p.name for p in inspect.signature(Call).parameters.values() if p.kind is p.KEYWORD_ONLY]
    theirs = [list(inspect.signature(schedules._ORIGINAL[name]).parameters) for name in schedules._FUNCTIONS]
    return ours, theirs


def test_signature_is_upstreams(pool: Pool) -> None:
    ours, theirs = pool.run(1, signatures)[0]
    for upstream in theirs:
        assert ours == upstream


def getter_follows_patch() -> list[str]:
    run = tiny_gpt.Run("zb-h1", pp=1)
    names = [imported_early().__qualname__]
    schedules.restore()
    names.append(imported_early().__qualname__)
    run.pipeline.install()
    names.append(imported_early().__qualname__)
    return names


def test_getter_returns_the_pipelines_function(pool: Pool) -> None:
    ours, theirs = "Pipeline.forward_backward", "forward_backward_no_pipelining"
    assert pool.run(1, getter_follows_patch)[0] == [ours, theirs, ours]


def with_own_groups(schedule: str) -> list[Any]:
    """p2p_communicator and pg_collection given, as upstream's newer training loop does, and non-loss data collected."""
    run = tiny_gpt.Run(schedule, pp=RANKS, microbatches=3, flags=DEEP)
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)  # None between the ends
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    given = {"pg_collection": groups, "p2p_communicator": P2PCommunicator(groups.pp, run.config)}
    steps: list[Any] = [run.step(iteration, **given) for iteration in range(2)]
    steps.append(run.step(7, forward_only=True, first_val_step=True, **given))
    tiny_gpt.loss, original = non_loss, tiny_gpt.loss  # type: ignore[assignment]
    try:
        with torch.no_grad():
            data = run.forward_backward(9, forward_only=True, collect_non_loss_data=True)
    finally:
        tiny_gpt.loss = original  # type: ignore[assignment]
    return [*steps, [values.tolist() for values in data]]


def non_loss(output: torch.Tensor, non_loss_data: bool = False) -> torch.Tensor:
    assert non_loss_data
    return output.detach()


def test_given_groups_and_non_loss_data(pool: Pool) -> None:
    stock = pool.run(RANKS, with_own_groups, "stock")
    assert len(stock[-1][-1]) == 3, "one entry per microbatch"
    assert pool.run(RANKS, with_own_groups, "zb-h1") == stock
    assert known(pool.run(RANKS, with_own_groups, "zb-v")) == known(stock)


def calls_of_config_functions(schedule: str) -> dict[str, int]:
    """How often the functions that a caller puts into config are called."""
    run = tiny_gpt.Run(schedule, pp=RANKS, microbatches=4, flags=DEEP)
    config = run.config
    calls = {"finalize": 0, "grad_sync": 0, "scale": 0, "timer": 0}
    finalize, scale = config.finalize_model_grads_func, config.grad_scale_func

    def counted_finalize(chunks: Any, num_tokens: Any, **options: Any) -> None:
        assert isinstance(chunks, list)
        assert num_tokens is None
        assert options["force_all_reduce"] is True
        calls["finalize"] += 1
        finalize(chunks, num_tokens, **options)

    def counted_sync(parameters: Any) -> None:
        calls["grad_sync"] += len(list(parameters)) > 0

    def counted_scale(loss: torch.Tensor) -> torch.Tensor:
        calls["scale"] += 1
        return scale(loss)

    class Timers:
        def __call__(self, _name: str, log_level: int = 0) -> Timers:
            return self

        def start(self, barrier: bool = False) -> None:
            calls["timer"] += 1

        def stop(self, barrier: bool = False) -> None:
            calls["timer"] -= 1

    config.finalize_model_grads_func = counted_finalize
    config.grad_scale_func = counted_scale
    config.grad_sync_func = counted_sync
    config.timers = Timers()
    run.step(0, force_all_reduce=True)
    config.timers = None
    return calls


def test_functions_of_config_are_called_as_upstream_calls_them(pool: Pool) -> None:
    stock = pool.run(RANKS, calls_of_config_functions, "stock")
    assert stock[0]["finalize"] == 1
    assert stock[1]["grad_sync"] == 1
    assert pool.run(RANKS, calls_of_config_functions, "zb-h1") == stock
    v = pool.run(RANKS, calls_of_config_functions, "zb-v")
    assert [rank["scale"] for rank in v] == [rank["scale"] for rank in reversed(stock)] == [4, 0, 0, 0]
    assert all((rank["finalize"], rank["timer"]) == (1, 0) for rank in v)


def adjusted_shapes(schedule: str) -> list[tiny_gpt.Step]:
    """Shapes that the caller adjusts are what is received: here, the sequence is really half of what is announced."""
    run = tiny_gpt.Run(schedule, pp=RANKS, flags=DEEP)
    run.args |= {"seq_length": 2 * run.args.seq_length}
    halved = [(run.args.seq_length // 2, run.args.micro_batch_size, run.config.hidden_size)]
    original = run._tokens
    run._tokens = lambda iteration: (tokens[:, : run.args.seq_length // 2 + 1] for tokens in original(iteration))  # type: ignore
    return [run.step(iteration, adjust_tensor_shapes_fn=lambda received, sent: (halved, halved)) for iteration in range(2)]


def test_adjusted_shapes(pool: Pool) -> None:
    assert pool.run(RANKS, adjusted_shapes, "zb-h1") == pool.run(RANKS, adjusted_shapes, "stock")
    with pytest.raises(RankFailed, match="adjust_tensor_shapes_fn works with one chunk per rank only"):
        pool.run(RANKS, adjusted_shapes, "zb-v")


def variable_lengths(schedule: str) -> list[tiny_gpt.Step]:
    """Every microbatch has a length of its own: upstream's communicator then sends shapes first."""
    run = tiny_gpt.Run(schedule, pp=RANKS, microbatches=5, flags=DEEP)
    run.config.variable_seq_lengths = True
    original = run._tokens

    def cut(iteration: int) -> Any:
        for index, tokens in enumerate(original(iteration)):
            yield tokens[:, : 6 + 2 * index]

    run._tokens = cut  # type: ignore[method-assign]
    return [run.step(iteration) for iteration in range(3)]


def test_variable_sequence_lengths(pool: Pool) -> None:
    stock = pool.run(RANKS, variable_lengths, "stock")
    assert pool.run(RANKS, variable_lengths, "zb-h1") == stock
    assert known(pool.run(RANKS, variable_lengths, "zb-v")) == known(stock)


def one_group_only() -> str:
    run = tiny_gpt.Run("zb-h1", pp=1)
    with pytest.raises(ValueError, match="both") as error:
        run.step(0, pg_collection=object())
    return str(error.value)


def test_one_of_the_groups_alone_is_refused(pool: Pool) -> None:
    assert "p2p_communicator" in pool.run(1, one_group_only)[0]


def test_schedule_from_a_file(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(planning.plan("zb-h2", RANKS, 4).to_json())
    named = f"file:{path}"
    sizes: dict[str, Any] = {"pp": RANKS, "iterations": 2, "flags": DEEP}
    assert pool.run(RANKS, tiny_gpt.train, named, **sizes) == pool.run(RANKS, tiny_gpt.train, "zb-h2", **sizes)
    evaluated = pool.run(RANKS, evaluate_six, named)
    assert evaluated == pool.run(RANKS, evaluate_six, "stock")


def evaluate_six(schedule: str) -> tiny_gpt.Step:
    """Evaluation with another number of microbatches than the file's."""
    run = tiny_gpt.Run(schedule, pp=RANKS, microbatches=4, flags=DEEP)
    run.microbatches = 6
    return run.step(0, forward_only=True)


def within_limit() -> list[int]:
    """Evaluation keeps no activations, so the limit of training does not apply to it."""
    pipeline = Pipeline(Request("zb-h1", 2, 8, memory_limit=2))
    pipeline.plans.check(8)
    return [len(pipeline.plans.plan(8, forward_only).schedule.passes[0]) for forward_only in (False, True)]


def test_memory_limit_leaves_evaluation_alone(pool: Pool) -> None:
    assert pool.run(1, within_limit)[0] == [24, 8]


def report_of(schedule: str) -> Any:
    run = tiny_gpt.Run(schedule, pp=2)
    before = run.pipeline.report()
    run.step(0)
    report = run.pipeline.report()
    run.step(1, forward_only=True)
    assert run.pipeline.report() == report, "evaluation leaves the report of the last training iteration"
    planned = None if schedule == "stock" else run.pipeline.plans.plan(4).schedule.passes
    return before, report, planned


@pytest.mark.parametrize("schedule", ["stock", "1f1b", "zb-h1"])
def test_report(pool: Pool, schedule: str) -> None:
    before, report, planned = pool.run(2, report_of, schedule)[0]
    assert before is None
    assert 0 < report.timeline.bubble_rate < 1
    assert len(report.peak_activation_bytes) == 2
    planned = planned or planning.plan("1f1b", 2, 4).passes
    assert tuple(tuple(timed.work for timed in rank) for rank in report.timeline.ranks) == planned
