"""A search finds what trying everything would, tries what saves memory where that is short, and writes what training runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from marked import rest
from tune.small import candidate, layouts, on_device, result

from megatron.pipeline.cli.memory import predicted
from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.flags import as_flags
from megatron.pipeline.tune import relax, search, write
from megatron.pipeline.tune.candidate import Candidate
from megatron.pipeline.tune.costs import CandidateCosts
from megatron.pipeline.tune.iteration import Dominated, Infeasible, Result, evaluate, least_seconds
from megatron.pipeline.tune.layouts import FULL_RECOMPUTE, Layouts
from megatron.pipeline.tune.search import Place, place

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(ROOT.glob("configs/**/*.yaml"))
RECOMPUTE = FULL_RECOMPUTE | {"recompute_fused_backward": True}
QUICK = ("1f1b", "zb-h1")  # to plan
SCARCE = 6.2e9  # bytes of a GPU


@pytest.fixture(scope="module")
def space() -> Layouts:
    return layouts("--vocab-size 16383", tensor=(1,), pipeline=(1, 2, 4), microbatch=(1, 2), schedules=QUICK)


def everything(on: Layouts, stock: bool, short: bool) -> list[Result | Infeasible]:
    """What becomes of all candidates, those that interlock included, and those that save memory if it is short.

    With enough of it a search need not try them. Offload can be faster even so, by some 2 %: it lets ZB-H1 hold more.
    """

    def family(one: Candidate) -> Iterator[Candidate]:
        yield one
        for leaner in on.remedies(one) if short else ():
            yield from family(leaner)

    tried = [each for layout in on for one in on.candidates(layout, stock) for each in family(one)]
    tried += [other for one in tried for other in on.interlocked(one)]
    outcomes = [evaluate(on.cluster, one) for one in tried]
    return [outcome for outcome in outcomes if isinstance(outcome, Result | Infeasible)]


def fastest(outcomes: list[Result | Infeasible]) -> dict[Place, float]:
    best: dict[Place, float] = {}
    for outcome in outcomes:
        if isinstance(outcome, Result):
            layout = place(outcome.candidate)
            best[layout] = min(outcome.seconds, best.get(layout, float("inf")))
    return best


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("stock", "memory"), [rest(False, 80e9), (True, SCARCE), rest(False, SCARCE)])
def test_a_search_finds_what_trying_everything_finds(space: Layouts, stock: bool, memory: float) -> None:
    on = on_device(space, memory=memory)
    best = fastest(everything(on, stock, short=memory == SCARCE))
    for wanted in (2, 100):
        found = search.search(on, stock, wanted)
        ranked = sorted(best.values())[:wanted]
        assert len(found.best(wanted)) == len(ranked) > 1
        for mine, its in zip(found.best(wanted), ranked, strict=True):
            assert mine.seconds <= 1.01 * its
            assert mine.seconds <= best[place(mine.candidate)] * 1.007, "what gains less than 0.7 % may not be planned"
        assert all(outcome.fullest.total <= memory for outcome in found.results)
        assert 0.8 * min(best.values()) < found.bound <= min(best.values())
        seconds = [each.seconds for each in found.results]
        assert seconds == pytest.approx(sorted(seconds), rel=1e-2), "as exactly as they are ranked"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("memory", [80e9, rest(SCARCE)])
def test_what_cannot_be_the_fastest_is_not_planned_and_the_fastest_stays(space: Layouts, memory: float) -> None:
    on = on_device(space, memory=memory)
    stock = search.search(on, True, 3)
    limits = search.SearchLimits(beat=stock.results[0].seconds, error=1.04)
    whole, pruned = (search.search(on, limits=each) for each in (search.SearchLimits(), limits))
    assert pruned.tried < whole.tried
    first, same = (stock.joined(each).results[0] for each in (whole, pruned))
    assert same.candidate.changes == first.candidate.changes and same.seconds == first.seconds
    assert whole.bound <= stock.joined(pruned).bound <= same.seconds


@pytest.mark.usefixtures("here")
def test_one_candidate_stands_for_a_layout_that_cannot_fit_or_be_the_fastest(space: Layouts) -> None:
    count = len(list(space))
    slow = search.search(space, limits=search.SearchLimits(beat=1e-3, error=1.04))
    assert slow.beaten == count and not slow.tried and 1e-3 < slow.bound < 1e3
    full = search.search(on_device(space, memory=2.5e9), limits=search.SearchLimits(beat=1e3, error=1.04))
    assert len(full.misfits) == count and not full.results


def test_a_pipeline_has_no_more_ranks_than_layers_and_ends() -> None:
    on = layouts("--global-batch-size 131072", gpus=2**17, tensor=(1,), microbatch=(1,))
    assert {layout["pipeline_model_parallel_size"] for layout in on} == {1, 2, 4, 8}


@pytest.mark.usefixtures("here")
def test_the_front_is_one(space: Layouts) -> None:
    found = search.search(space, wanted=100)
    front = found.front()
    assert len(front) > 1 and front[0] is found.results[0]
    for each in found.results:
        if each not in front:
            better = [one for one in front if one.fullest.total <= each.fullest.total and one.seconds <= each.seconds * 1.001]
            assert better
    memory = [one.fullest.total for one in front]
    assert memory == sorted(memory, reverse=True)


def test_what_only_memory_makes_too_slow_is_tried_with_offload() -> None:
    """The bound within the memory of a device says nothing of what is partly elsewhere."""
    on = on_device(layouts(pipeline=(4,), microbatch=(2,), schedules=("v-auto",)), to_host=1e12, to_device=1e12, memory=5.4e9)
    plain = candidate(on, "v-auto", micro_batch_size=2)
    (offloaded,) = (one for one in on.remedies(plain) if one.args.offloading.mode)
    beat = 1.001 * result(on, offloaded).seconds
    assert isinstance(evaluate(on.cluster, offloaded, beat), Result)
    beaten = evaluate(on.cluster, plain, beat)
    assert isinstance(beaten, Dominated) and beaten.memory_bound
    assert any(one.args.offloading.mode for one in search._taken(search.SearchResult(), beaten, on))


def same(one: search.SearchResult, other: search.SearchResult) -> bool:
    """Whether two searches did the same."""

    def told(found: search.SearchResult) -> object:
        results = [(each.candidate.changes, each.seconds, each.fullest.total) for each in found.results]
        return results, found.tried, found.beaten, found.left_out, found.work

    return told(one) == told(other)


def test_more_processes_find_the_same(space: Layouts) -> None:
    on = replace(space, choices=replace(space.choices, pipeline=(2, 4), microbatch=(1,)))
    one, three = (
        search.search(on, wanted=2, limits=search.SearchLimits(processes=processes, budget=1.0)) for processes in (1, 3)
    )
    assert one.results and one.left_out and same(one, three)


@pytest.mark.rest
@pytest.mark.usefixtures("here")
def test_the_best_layout_is_finished_before_others_that_could_be_faster_at_best() -> None:
    """Most of the budget would go to layouts of large microbatches: they could be fastest, but memory is too scarce for them."""
    on = on_device(
        layouts("--vocab-size 16383", gpus=8, tensor=(1,), pipeline=(2, 4), microbatch=(1, 2, 4), schedules=("1f1b", "v-auto")),
        memory=7e9,
    )
    whole = search.search(on, wanted=1)
    assert whole.left_out == 0 and whole.results[0].candidate.variant.name == "v-auto"
    least = {
        place(one): least_seconds(CandidateCosts(on.cluster, one)) for layout in on for one in on.candidates(layout, stock=False)
    }
    assert least[place(whole.results[0].candidate)] > min(least.values())
    some = search.search(on, wanted=1, limits=search.SearchLimits(budget=460.0))
    assert some.left_out > 0 and some.work <= 460 < whole.work
    assert place(some.results[0].candidate) == place(whole.results[0].candidate)  # with post-validation or without


@pytest.mark.usefixtures("here")
def test_what_is_beyond_the_budget_or_the_time_is_counted(space: Layouts) -> None:
    nothing = search.search(space, limits=search.SearchLimits(budget=0.0))
    assert nothing.left_out > 20 and not nothing.results and nothing.tried == 0 and not nothing.stopped
    late = search.search(space, limits=search.SearchLimits(seconds=-1.0))
    assert late.left_out > 20 and not late.results and late.tried == 0 and late.stopped
    some = search.search(space, limits=search.SearchLimits(budget=0.1))
    assert some.results and some.left_out > 0 and some.work <= 0.1
    reported: list[tuple[int, int, float]] = []
    full = search.search(space, wanted=3, progress=lambda *told: reported.append(told))
    done = full.tried + full.beaten
    assert full.left_out == 0 and reported[-1] == (done, done, pytest.approx(1))
    assert all(0 <= share <= 1 + 1e-9 for *_, share in reported)


@pytest.mark.usefixtures("here")
def test_one_that_cannot_be_planned_does_not_end_a_search(space: Layouts, monkeypatch: pytest.MonkeyPatch) -> None:
    costs: Any = vars(CandidateCosts)["costs"].func

    def without(one: CandidateCosts) -> Any:
        if one.candidate.variant.name == "zb-h1":
            raise ZeroDivisionError("of nothing")
        return costs(one)

    monkeypatch.setattr(CandidateCosts, "costs", property(without))
    found = search.search(space, wanted=3)
    assert found.results and {each.candidate.variant.name for each in found.results} == {"1f1b"}
    assert list(found.failed) == ["ZeroDivisionError('of nothing')"] and found.failed.total() > 3
    both = search.SearchResult(tried=1, failed=Counter("a"), stopped=True).joined(found)
    assert (both.tried, both.failed.total(), both.stopped) == (found.tried + 1, found.failed.total() + 1, True)
    assert both.results == found.results and both.refused == found.refused


# What saves memory.


def winner(on: Layouts) -> Result:
    found = search.search(on)
    return found.results[0]


@pytest.mark.usefixtures("here")
def test_recomputation_wins_where_nothing_else_fits() -> None:
    on = on_device(layouts("--vocab-size 16383", pipeline=(4,), microbatch=(4,), schedules=("1f1b",)), memory=8e9)
    best = winner(on)
    assert best.candidate.args.recompute_granularity == "full" and best.parts.recomputation > 0
    assert "recompute full" in write.extras(best)


@pytest.mark.usefixtures("here")
def test_attention_alone_is_made_again_where_it_is_not_fused() -> None:
    on = layouts("--transformer-impl local", pipeline=(4,), microbatch=(2,), schedules=("1f1b",))
    best = winner(on_device(on, memory=10e9))
    assert best.candidate.args.recompute_granularity == "selective"


def test_the_recomputation_of_recipes_is_tried() -> None:
    latent = "--multi-latent-attention --q-lora-rank 512 --kv-lora-rank 256 --recompute-granularity selective"
    on = layouts(f"{latent} --disable-bias-linear --recompute-modules core_attn mlp", pipeline=(4,), schedules=("1f1b",))
    for stock in (True, False):
        tried = [one.args.recompute_modules for one in on.remedies(candidate(on, "1f1b", stock))]
        assert ["mla_up_proj"] in tried and ["core_attn", "mlp"] in tried


def test_fewer_bits_are_tried_where_numbers_may_change() -> None:
    """One after another, so that no candidate comes twice."""
    flags = "--fp8-format hybrid --fp8-recipe tensorwise"
    narrow, plain = (layouts(flags, pipeline=(4,), numerics=numerics) for numerics in (True, False))
    first = candidate(narrow, "1f1b", True, use_distributed_optimizer=True)
    assert not list(plain.narrower(first))
    (gradients,) = narrow.narrower(first)
    (moments,) = narrow.narrower(gradients)
    assert [one.args.accumulate_allreduce_grads_in_fp32 for one in (first, gradients, moments)] == [True, False, False]
    assert moments.args.exp_avg == moments.args.exp_avg_sq == "bf16" and moments.args.fp8_param_gather
    assert not list(narrow.narrower(moments)) and gradients in list(narrow.remedies(first))


def test_fewer_bits_make_fit_what_no_recomputation_does() -> None:
    whole = layouts(gpus=8, pipeline=(4,), tensor=(1,), microbatch=(1,), numerics=True)
    shared = {"pipeline_model_parallel_size": 4, "use_distributed_optimizer": True}
    leanest = result(whole, candidate(whole, "1f1b", True, **shared, **FULL_RECOMPUTE)).fullest
    short = on_device(whole, memory=leanest.total - 0.05 * leanest.state)
    found = search.search(short, stock=True)
    assert found.results and all(one.candidate.args.grad_reduce_in_bf16 for one in found.results)
    assert "grad-reduce-in-bf16" in write.extras(found.results[0])
    assert not search.search(replace(short, choices=replace(short.choices, numerics=False)), stock=True).results


@pytest.mark.usefixtures("here")
def test_offload_wins_where_copies_are_fast() -> None:
    on = on_device(
        layouts(gpus=4, pipeline=(4,), microbatch=(4,), schedules=("zb-h1",)), to_host=1e12, to_device=1e12, memory=7e9
    )
    best = winner(on)
    assert best.candidate.args.offloading.mode == "full" and "offload full" in write.extras(best)


@pytest.mark.usefixtures("here")
def test_a_spread_vocabulary_wins_where_it_is_large_and_interlocking_where_it_is_shorter() -> None:
    on = layouts("--vocab-size 131071", pipeline=(4,), microbatch=(1,), schedules=("zb-h1", "zb-h2"))
    best = winner(on)
    assert best.candidate.args.vocabulary.spread
    plain = winner(layouts(pipeline=(4,), microbatch=(1,), schedules=("zb-h2",)))
    assert plain.candidate.args.steps.ahead


# What would make it fit.


def test_the_smallest_changes_fit_and_smaller_ones_do_not() -> None:
    on = on_device(layouts(gpus=2, per_node=2), memory=4e9)
    assert not relax.fits(on)
    gpus, *others = relax.smallest_changes(on)
    count = int(gpus.split()[0])
    assert gpus == f"{count} GPUs instead of 2"
    assert relax.fits(relax.replace_cluster(on, gpus=count))
    assert not relax.fits(relax.replace_cluster(on, gpus=count // 2))
    assert others == ["--gpu A100-40GB"], "a shorter sequence does not help: it is the weights"


# Files.


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_flags_written_and_read_again_are_the_same(path: Path, tmp_path: Path) -> None:
    read = vars(parse(["--config", str(path)]))
    (tmp_path / "written.yaml").write_text(yaml.safe_dump(as_flags(read)))
    again = vars(parse(["--config", str(tmp_path / "written.yaml")]))
    assert {**again, "config": None} == {**read, "config": None}


def test_a_window_is_written_as_it_is_read(tmp_path: Path) -> None:
    flags = "--window-size 128,0 --moe-layer-freq [0]+[1]*3 --recompute-modules core_attn mlp".split()
    (tmp_path / "written.yaml").write_text(yaml.safe_dump(as_flags(vars(parse(flags)))))
    again = parse(["--config", str(tmp_path / "written.yaml")])
    assert (again.window_size, again.moe_layer_freq, again.recompute_modules) == ((128, 0), [0, 1, 1, 1], ["core_attn", "mlp"])


KINDS: dict[str, tuple[str, dict[str, Any], float]] = {
    "limited": ("v-auto", {}, 6.8e9),
    "spread": ("zb-h1", {"vocab_parallel": "1"}, 80e9),
    "interlaced": ("1f1b", {"vocab_parallel": "interlaced", "post_validation": True}, 80e9),
    "offloaded": ("zb-h1", {"offload": "full"}, 80e9),
    "recomputed": ("zb-h1", RECOMPUTE, 80e9),
    "redistributed": ("interleaved", {"layer_redistribution": True}, 80e9),
    "of both ends": ("zb-v", {}, 80e9),
    "stock": ("interleaved", {"stock": True, "account_for_loss_in_pipeline_split": False}, 80e9),
}
MODEL = [
    "--num-layers=8", "--hidden-size=2048", "--num-attention-heads=16", "--seq-length=2048", "--bf16",
    "--position-embedding-type=rope", "--tokenizer-type=NullTokenizer", "--vocab-size=127", "--global-batch-size=32",
    "--untie-embeddings-and-output-weights", "--train-iters=1", "--lr=1e-4",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_accepted_and_needs_the_memory_that_was_said(kind: str, tmp_path: Path) -> None:
    schedule, changes, memory = KINDS[kind]
    wide = ["--vocab-size=63999", "--global-batch-size=16"] if kind == "of both ends" else []
    on = on_device(layouts(" ".join(wide), gpus=4 if wide else 2), memory=memory)
    found = result(on, candidate(on, schedule, **changes))
    path = tmp_path / "best.yaml"
    write.write_config(found, [*MODEL, *wide], path, "one line\nanother")
    assert path.read_text().startswith("# one line\n# another\n\n")
    read = predicted(["--config", str(path)], world_size=on.cluster.gpus)
    assert read.schedule.placement == found.candidate.placement
    assert read.fullest.total == pytest.approx(found.fullest.total, rel=0.01)
    assert read.fullest.total <= memory
    assert path.with_suffix(".costs.json").exists() == (kind != "stock")
    if kind == "limited":
        assert found.memory_bound and "pipeline-memory-limit" in path.read_text()


def test_flags_of_the_model_stay_and_those_of_its_layout_go(tmp_path: Path) -> None:
    on = layouts(gpus=2)
    found = result(on, candidate(on, "zb-h1"))
    flags = [*MODEL, "--tensor-model-parallel-size=8", "--recompute-granularity=selective", "--save=runs/mine", "--seed=7"]
    write.write_config(found, flags, tmp_path / "best.yaml", "")
    told = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert told["save"] == "runs/mine" and told["seed"] == 7 and told["pipeline-model-parallel-size"] == 2
    assert told["pipeline-schedule"] == "zb-h1", "pretrain_gpt.py's default, but not that of mpipe launch"
    assert "tensor-model-parallel-size" not in told and "recompute-granularity" not in told


def test_a_schedule_is_called_by_what_is_left_to_its_user() -> None:
    on = layouts(gpus=2)
    kinds: list[tuple[str, dict[str, Any]]] = [("interleaved", {"chunks": 4}), ("interleaved", {"stock": True}), ("zb-h1", {})]
    names = [write.chosen(result(on, candidate(on, name, **changes))) for name, changes in kinds]
    assert names == ["interleaved, 4 chunks", "stock interleaved, 2 chunks", "zb-h1"]
