"""``--rehearse-replicas fake``: one rank of every stage runs, with the share of all that the flags have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from marked import whole
from pool import Pool
from session.test_rehearsal import FLAGS as REHEARSED
from training.short_runs import train_for_all

from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.validation import validate
from megatron.pipeline.planner.costmodel.device import Link, named
from megatron.pipeline.planner.costmodel.links import Links, collective_seconds
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.schedule.core.problem import Objective
from megatron.pipeline.session import rehearsal

OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
EXPERTS = "--num-experts 4 --expert-model-parallel-size 2"


@pytest.mark.parametrize(
    ("flags", "share"),
    [
        ("zb-v --tensor-model-parallel-size 2 --sequence-parallel", 2),
        (f"zb-h1 {EXPERTS} --moe-token-dispatcher-type alltoall --rehearse-replicas fake:4 --use-distributed-optimizer", 4),
        whole("zb-h1 --context-parallel-size 2 --tensor-model-parallel-size 2", 4),
        whole("v-half --vocab-parallel 2 --tensor-model-parallel-size 2", 2),
        whole(f"1f1b {EXPERTS} --moe-token-dispatcher-type allgather", 2),
        whole("stock --tensor-model-parallel-size 4", 4),
        whole("zb-h1 --tensor-model-parallel-size 2 --rehearse-park", 2),
        whole("zb-h2 --tensor-model-parallel-size 2 --post-validation", 2),
        whole(f"zb-h1 --bf16 {OVERLAPS} --rehearse-replicas fake:4", 4),
        whole("gis-h --offload full --offload-min-size 1KiB --offload-cpu-bandwidth 4 --tensor-model-parallel-size 2", 2),
    ],
)
def test_ranks_that_are_not_there_have_their_share(pool: Pool, tmp_path: Path, flags: str, share: int) -> None:
    given = f"--mock-data --pipeline-schedule {flags} --pipeline-model-parallel-size 2 --rehearse --rehearse-dir {tmp_path}"
    fake = "" if "--rehearse-replicas" in flags else "--rehearse-replicas fake"
    gpu, late = named("H100-80GB"), 2e-3
    machine = tmp_path / "machine.json"
    machine.write_text(replace(gpu, within=Link(late, gpu.within.bandwidth)).to_json())
    assert pool.run(2, train_for_all, f"{given} {fake} --rehearse-hop {machine}") == [""] * 2
    found = json.loads((tmp_path / "rehearsal.json").read_text())
    assert found["ranks_of_a_stage"] == share
    assert found["passes_seconds"] > 0 and len(found["ranks"]) == 2
    replicated = any(word in flags for word in ("fake:4", "context-parallel", "expert-model-parallel"))
    assert (found["replicas_seconds"] > 0) is replicated
    if "--tensor-model-parallel-size" in flags:  # F gathers, or sums up, twice in a layer, in addition to what it computes
        assert all(row["least_seconds"] >= 2 * late for row in found["passes"] if row["kind"] == "F")


FLAGS = f"{REHEARSED} --global-batch-size 16"


@pytest.mark.parametrize(
    ("flags", "data", "share"),
    [
        ("fake", 1, 1),
        ("fake:4", 4, 4),
        ("fake --tensor-model-parallel-size 2", 1, 2),
        ("fake:2 --tensor-model-parallel-size 2 --context-parallel-size 2", 2, 8),
        (f"fake --tensor-model-parallel-size 2 --sequence-parallel {EXPERTS} --disable-bias-linear", 2, 4),
        ("fake --num-experts 4 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1", 4, 4),
    ],
)
def test_the_flags_say_how_many_ranks_one_stands_for(flags: str, data: int, share: int) -> None:
    args = validate(parse(f"{FLAGS} --rehearse --rehearse-replicas {flags}".split()), 2)
    assert (args.data_parallel_size, args.rehearsal.share) == (data, share)


@pytest.mark.parametrize(
    ("flags", "collectives"),
    [
        ("fake:2", "none"),
        ("fake --tensor-model-parallel-size 2", "left out"),
        ("fake --tensor-model-parallel-size 2 --rehearse-hop A100-80GB", "priced"),
        ("fake:2 --num-experts 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", "left out"),
    ],
)
def test_costs_say_whether_they_have_the_time_of_collectives(flags: str, collectives: str) -> None:
    args = validate(parse(f"{FLAGS} --rehearse --rehearse-replicas {flags}".split()), 2)
    assert rehearsal._collectives(args) == collectives


@pytest.mark.parametrize("hop", ["A100-80GB", "0.001"])
def test_ranks_that_share_a_sequence_sum_their_gradients_over_links_that_are_known(hop: str) -> None:
    flags = f"{FLAGS} --rehearse --rehearse-replicas fake --context-parallel-size 2 --rehearse-hop {hop}"
    args = validate(parse(flags.split()), 2)
    assert args.data_parallel_size == 1
    plan = Request("zb-h1", 2, 4, Costs((StageCosts(1.0, 1.0, 1.0),) * 2), objective=Objective.MAKESPAN).plan()
    seconds = rehearsal._replicas(args | {"padded_vocab_size": 384}, plan.schedule, plan.problem.costs, plan.value)
    assert seconds is None if hop == "0.001" else seconds and seconds > 0


@pytest.mark.parametrize(
    ("flags", "ranks", "words"),
    [
        ("--rehearse-replicas fake", 2, "--rehearse-replicas fake is for a rehearsal: add --rehearse, or leave it out"),
        ("--rehearse --rehearse-replicas real", 2, "--rehearse-replicas real: fake, or fake:8 for 8 data-parallel replicas"),
        ("--rehearse --rehearse-replicas fake:0", 2, "--rehearse-replicas fake:0: fake, or fake:8"),
        ("--rehearse --rehearse-replicas fake", 4, "runs one rank for each of the 2 .*, and 4 were started: start 2, or leave"),
        ("--rehearse --rehearse-replicas fake --load runs/x", 2, "their share of the weights in runs/x, .* leave --load out"),
        ("--rehearse --rehearse-replicas fake:2 --rehearse-park", 2, "does not go with 2 data-parallel replicas: leave it out"),
        (
            "--rehearse --rehearse-replicas fake:3 --num-experts 4 --expert-model-parallel-size 2",
            2,
            "6 ranks cannot share experts over 1 x 2 x 2 = 4",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: str, ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        validate(parse(f"{FLAGS} {flags}".split()), ranks)


def test_collectives_take_what_the_model_of_costs_says() -> None:
    links = Links.within(named("H100-80GB"))
    link = links.tensor
    assert collective_seconds("all_reduce", 1e6, 4, link) == link.all_reduce(1e6, 4)
    assert collective_seconds("all_gather", 1e6, 4, link) == collective_seconds("reduce_scatter", 1e6, 4, link)
    assert collective_seconds("all_to_all", 1e6, 4, link, links.expert) == links.expert.all_to_all(1e6, 4)
    assert collective_seconds("broadcast", 1e6, 4, link) == link.seconds(1e6)
    assert collective_seconds("barrier", 0, 4, link) == 0
