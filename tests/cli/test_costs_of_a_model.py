"""``mpipe costs``: costs of a model, in a file that the other commands take; and limits in bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import output, refusal, report

from megatron.pipeline.cli import main
from megatron.pipeline.planner.costmodel import origin
from megatron.pipeline.planner.schedule.core.costs import Costs

ROOT = Path(__file__).parents[2]
GIB = 2**30
LLAMA = ["costs", "--config", str(ROOT / "configs" / "llama3" / "8B.yaml"), "--gpu", "H100-80GB"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    assert main([*LLAMA, "-o", str(path)]) == 0
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    return report(capsys, "plan", "--schedule", "v-auto", "--pp", "4", "--microbatches", "16", *more)


def test_a_spread_vocabulary_goes_to_the_ends_of_plans_without_one(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The file of a training with --vocab-parallel 2 on 8 ranks plans schedules without it, and on other numbers of ranks."""
    flags = ["plan", "--schedule", "1f1b", "--pp", "4", "--microbatches", "4", "--costs", file, "--json"]
    shards = Costs.from_json(Path(file).read_text()).vocabulary
    assert shards.ranks == 8 and shards.S > 0
    spread = json.loads(output(capsys, *flags, "--vocab-parallel", "2"))
    assert spread["vocab_costs"]["S"] == pytest.approx(2 * shards.S)
    alone = json.loads(output(capsys, *flags))["stage_costs"]["stages"]
    assert alone[-1]["forward"] - alone[1]["forward"] == pytest.approx(8 * shards.S)
    assert alone[0]["forward"] - alone[1]["forward"] == pytest.approx(8 * shards.IF)


def test_it_has_seconds_and_bytes_of_every_stage_and_what_they_are_of(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    costs, of = origin.read(output(capsys, *LLAMA, "--vocab-parallel", "off", "--json"))
    assert len(Costs.from_json(Path(file).read_text()).stages) == len(costs.stages)
    assert len(costs.stages) >= 4 and costs.hop > 0
    assert of["num_layers"] == 32 and of["hidden_size"] == 4096 and of["numbers"] == "bf16"
    first, middle, last = costs.stages[0], costs.stages[1], costs.stages[-1]
    assert last.forward > middle.forward and 1e-4 < middle.forward < 1 and 2**20 < first.activation < 80 * GIB
    assert middle.retained <= middle.activation


def test_experts_need_not_be_cut_as_other_layers_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a layer, all on a node, are reached over its links."""
    model = (
        "costs --gpu H100-80GB --num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --micro-batch-size 1 "
        "--global-batch-size 16 --train-iters 1 --lr 1e-4 --bf16 --tokenizer-type NullTokenizer --vocab-size 1000 "
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --num-experts 16 --moe-grouped-gemm "
        "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall --disable-bias-linear --data-parallel-size 8 "
        "--micro-batch-size 64 --global-batch-size 1024"  # longer than the host needs
    )

    def forward(expert: int) -> float:
        told = output(capsys, *model.split(), "--expert-model-parallel-size", str(expert), "--json")
        return Costs.from_json(told).stages[0].forward

    assert forward(4) == pytest.approx(forward(8), rel=0.25), "within a node"
    assert forward(16) > 1.3 * forward(8), "over two"


def test_the_table_names_stages_milliseconds_and_mib(capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys, *LLAMA)
    assert out.startswith("one microbatch on H100-80GB\n")
    assert "F ms" in out and "activations, MiB" in out and "a message between stages takes" in out


def test_a_limit_in_bytes_holds_and_is_what_its_number_is(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    free = max(planned(capsys, "--costs", file)["peak_activation"])
    gib = f"{0.6 * free / GIB:.3f}GiB"
    plan = planned(capsys, "--costs", file, "--memory-limit", gib)
    limit = int(float(gib.removesuffix("GiB")) * GIB)
    assert plan["memory_limit"] == limit and max(plan["peak_activation"]) <= limit < free
    same = planned(capsys, "--costs", file, "--memory-limit", str(limit))
    assert same["passes"] == plan["passes"]


def test_reports_and_refusals_count_mib(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--pp", "4", "--microbatches", "8", "--costs", file]
    assert "MiB on the fullest rank; by rank" in output(capsys, "plan", "--schedule", "zb-v", *sizes)
    table = output(capsys, "compare", *sizes, "--schedules", "1f1b,zb-v", "--memory-limit", "40GiB", "--json")
    assert "refused" in json.loads(table)
    assert "--memory-limit 1MiB is too little for v-auto, which needs 11220MiB: raise it" in refusal(
        capsys, "plan", "--schedule", "v-auto", *sizes, "--memory-limit", "1MiB"
    )
    assert "memory, MiB" in output(capsys, "compare", *sizes, "--schedules", "1f1b,zb-v")


def test_a_stage_without_layers_of_experts_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the embedding or the output layer alone; plans read the file, and their own report of it."""
    flags = ["costs", "--config", str(ROOT / "configs" / "mixtral" / "8x7B.yaml"), "--gpu", "A100-80GB"]
    layout = ["--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-layout", "E|t*16|t*16|L"]
    costs, plan = str(tmp_path / "costs.json"), str(tmp_path / "plan.json")
    assert main([*flags, "--pipeline-schedule", "1f1b", *layout, "-o", costs]) == 0
    assert [stage.layers for stage in Costs.from_json(Path(costs).read_text()).stages] == [0, 16, 16, 0]
    sizes = ["--schedule", "1f1b", "--pp", "4", "--microbatches", "8"]
    assert main(["plan", *sizes, "--costs", costs, "-o", plan]) == 0
    assert output(capsys, "plan", plan)


def test_limits_of_host_memory_are_in_mib_too(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--schedule", "zb-h1", "--pp", "4", "--microbatches", "8"]
    flags, plan = ["plan", *sizes, "--offload", "full"], str(tmp_path / "plan.json")
    assert "--host-memory-limit of 1GiB, but the costs do not count bytes" in refusal(
        capsys, *flags, "--host-memory-limit", "1GiB"
    )
    refused = "--host-memory-limit 1MiB has no room for one microbatch of a chunk, which takes 8704MiB"
    assert refused in refusal(capsys, *flags, "--costs", file, "--host-memory-limit 1MiB")
    assert main(["plan", *sizes, "-o", plan]) == 0
    more = ["--offload full --host-memory-limit 1MiB --costs", file]
    assert refused in refusal(capsys, "compare --schedules zb-h1,1f1b", *sizes[2:], *more)
    again = ["plan", plan, "--offload", "full", "--host-memory-limit"]
    assert "of 1GiB, but the costs do not count bytes" in refusal(capsys, *again, "1GiB")
    assert refused in refusal(capsys, *again, "1MiB", "--costs", file)
