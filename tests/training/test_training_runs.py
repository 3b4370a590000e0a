"""Whole trainings over a few ranks: restarts, checkpoints, signals, and who reads which data."""

from __future__ import annotations

import gc
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from marked import rest
from pool import Pool
from releases import CORE
from training.short_runs import batches, metrics, ran, train, warned

from megatron.pipeline.session import checkpoints
from megatron.pipeline.trainer.iterations import Iterations


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        rest(2, "--pipeline-model-parallel-size 2"),
        (
            4,
            "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
            "--fp16 --initial-loss-scale 1024 --loss-scale-window 2",
        ),
        rest(1, "--optimizer sgd"),
        rest(4, "--pipeline-model-parallel-size 2 --use-distributed-optimizer --num-experts 4 --expert-model-parallel-size 2"),
    ],
    ids=["float32", "fp16-distributed-optimizer", "sgd", "experts-distributed-optimizer"],
)
def test_resumed_is_bit_identical_to_uninterrupted(pool: Pool, data: str, tmp_path: Path, ranks: int, flags: str) -> None:
    flags = f"{data} {flags} --eval-interval 2 --eval-iters 1"
    assert ran(pool.run(ranks, train, f"{flags} --metrics {tmp_path}/whole.jsonl --tensorboard-dir {tmp_path}/board"))
    parts = f"{flags} --metrics {tmp_path}/parts.jsonl --save {tmp_path}/saved --load {tmp_path}/saved"
    assert ran(pool.run(ranks, train, f"{parts} --exit-interval 3"))
    assert ran(pool.run(ranks, train, parts))
    whole = metrics(tmp_path / "whole.jsonl")
    assert [iteration for iteration, _, _ in whole] == [1, 2, 3, 4, 5, 6]
    assert metrics(tmp_path / "parts.jsonl") == whole


@pytest.mark.rest
def test_saved_before_the_first_step_that_counts(pool: Pool, data: str, tmp_path: Path) -> None:
    flags = f"{data} --use-distributed-optimizer --fp16 --initial-loss-scale {2**21} --hysteresis 1 --train-iters 10"
    assert ran(pool.run(2, train, f"{flags} --metrics {tmp_path}/whole.jsonl"))
    whole = metrics(tmp_path / "whole.jsonl")
    assert [norm is None for _, _, norm in whole[:2]] == [True, True] and whole[-1][2] is not None
    parts = f"{flags} --metrics {tmp_path}/parts.jsonl --save {tmp_path}/saved --load {tmp_path}/saved"
    assert ran(pool.run(2, train, f"{parts} --save-interval 1 --exit-interval 2"))
    assert ran(pool.run(2, train, parts))
    assert metrics(tmp_path / "parts.jsonl") == whole


@pytest.mark.rest
def test_a_dynamic_loss_scale_follows_a_constant_one(pool: Pool, data: str, tmp_path: Path) -> None:
    flags = f"{data} --fp16 --save {tmp_path}/saved --load {tmp_path}/saved --metrics {tmp_path}/m.jsonl"
    assert ran(pool.run(1, train, f"{flags} --loss-scale 1024 --exit-interval 2"))
    assert ran(pool.run(1, train, f"{flags} --initial-loss-scale 1024"))
    assert ran(pool.run(1, train, f"{data} --fp16 --loss-scale 1024 --metrics {tmp_path}/constant.jsonl"))
    assert metrics(tmp_path / "m.jsonl") == metrics(tmp_path / "constant.jsonl")


@pytest.mark.skipif(CORE >= (0, 19), reason="its common state lies among the tensors, where this test cannot change it")
def test_a_checkpoint_of_megatrons_goes_on(pool: Pool, data: str, tmp_path: Path) -> None:
    """One in its layout; tests/launch has those that Megatron-LM itself wrote."""
    flags = f"{data} --eval-iters 1 --eval-interval 2 --clip-grad 0 --metrics {tmp_path}/{{}}.jsonl"
    assert ran(pool.run(1, train, flags.format("whole")))
    assert ran(pool.run(1, train, f"{flags.format('parts')} --save {tmp_path}/saved --exit-interval 2"))
    pool.run(1, as_megatron_writes, str(tmp_path / "saved" / "iter_0000002"))
    assert ran(pool.run(1, train, f"{flags.format('parts')} --load {tmp_path}/saved"))
    parts, whole = ([step[:2] for step in metrics(tmp_path / name)] for name in ("parts.jsonl", "whole.jsonl"))
    assert parts == whole and len(whole) == 6


def as_megatron_writes(directory: str) -> None:
    """Make one of our checkpoints like Megatron-LM's: without what it does not write, and with its values of some flags."""
    path = Path(directory)
    common = torch.load(path / "common.pt")
    args = common["args"]
    args.num_query_groups, args.add_qkv_bias, args.vocab_size = args.num_attention_heads, True, None
    torch.save(common | {"rerun_state_machine": {"mode": "disabled"}}, path / "common.pt")
    (path / "training.json").unlink()


def test_an_error_that_says_nothing_is_named_when_a_checkpoint_fails(pool: Pool, data: str, tmp_path: Path) -> None:
    assert ran(pool.run(1, train, f"{data} --save {tmp_path}/saved --exit-interval 1"))
    (error,) = pool.run(1, train_with_a_broken_writer, f"{data} --save {tmp_path}/saved --exit-interval 2")
    assert f"iter_0000002 could not be written (AssertionError in {__file__}:" in error
    assert error.endswith(f"assert not state); the checkpoint {tmp_path}/saved/iter_0000001 is complete and unchanged")


def train_with_a_broken_writer(flags: str) -> str:
    def save(state: Any, *_: Any, **__: Any) -> None:
        assert not state

    with patch("megatron.pipeline.trainer.checkpoint.dist_checkpointing.save", save):
        return train(flags)


def test_another_pipeline_size_and_schedule_goes_on(pool: Pool, data: str, tmp_path: Path) -> None:
    """One rank's numbers are those of two: same weights, optimizer and samples."""
    saved = f"{data} --save {tmp_path}/saved"
    assert ran(pool.run(2, train, f"{saved} --pipeline-model-parallel-size 2 --exit-interval 3"))
    load = f"{data} --load {tmp_path}/saved --clip-grad 0"
    two = f"{load} --pipeline-model-parallel-size 2 --pipeline-schedule 1f1b --metrics {tmp_path}/two.jsonl"
    assert ran(pool.run(2, train, two))
    assert ran(pool.run(1, train, f"{load} --metrics {tmp_path}/one.jsonl"))
    two_losses = [(iteration, loss) for iteration, loss, _ in metrics(tmp_path / "two.jsonl")]
    one_losses = [(iteration, loss) for iteration, loss, _ in metrics(tmp_path / "one.jsonl")]
    assert two_losses == one_losses
    assert [iteration for iteration, _ in two_losses] == [4, 5, 6]


@pytest.mark.rest
def test_another_data_parallel_size_goes_on(pool: Pool, data: str, tmp_path: Path) -> None:
    """The distributed optimizer's state is cut anew; sums over samples come in another order."""
    flags = f"{data} --use-distributed-optimizer --attention-dropout 0 --hidden-dropout 0"
    two_by_two = f"{flags} --pipeline-model-parallel-size 2 --save {tmp_path}/saved --save-interval 3"
    assert ran(pool.run(4, train, f"{two_by_two} --metrics {tmp_path}/whole.jsonl"))
    (tmp_path / "saved" / checkpoints.TRACKER).write_text("3")
    four = f"{flags} --pipeline-model-parallel-size 4 --load {tmp_path}/saved --metrics {tmp_path}/four.jsonl"
    assert ran(pool.run(4, train, four))
    whole, four_deep = metrics(tmp_path / "whole.jsonl")[3:], metrics(tmp_path / "four.jsonl")
    assert [iteration for iteration, _, _ in four_deep] == [4, 5, 6]
    assert [loss for _, loss, _ in four_deep] == pytest.approx([loss for _, loss, _ in whole], rel=1e-5)


def test_sigterm_saves_and_ends_with_a_trace(pool: Pool, data: str, tmp_path: Path) -> None:
    flags = f"{data} --pipeline-model-parallel-size 2 --metrics {tmp_path}/m.jsonl --save {tmp_path}/saved "
    flags += f"--pipeline-trace {tmp_path}/trace"
    assert ran(pool.run(2, train, flags, terminate_at=2))
    assert [iteration for iteration, _, _ in metrics(tmp_path / "m.jsonl")] == [1, 2]
    assert checkpoints.latest(f"{tmp_path}/saved") == tmp_path / "saved" / "iter_0000002"
    record = json.loads((tmp_path / "trace" / "iteration_0000002.json").read_text())
    assert (record["schedule"], record["iteration"], record["placement"]) == ("zb-h1", 2, [[0], [1]])
    assert len(record["timeline"]["ranks"]) == 2
    assert_perfetto_can_show(record["traceEvents"], ranks=2)
    assert (tmp_path / "trace" / "iteration_0000002.png").stat().st_size > 1000


def test_training_that_is_done_does_nothing(pool: Pool, data: str, tmp_path: Path) -> None:
    flags = f"{data} --train-iters 3 --metrics {tmp_path}/m.jsonl --save {tmp_path}/saved --load {tmp_path}/saved"
    assert ran(pool.run(1, train, flags))
    assert ran(pool.run(1, train, flags))
    assert [iteration for iteration, _, _ in metrics(tmp_path / "m.jsonl")] == [1, 2, 3]


def test_full_disk_leaves_the_previous_checkpoint(pool: Pool, data: str, tmp_path: Path) -> None:
    flags = f"{data} --pipeline-model-parallel-size 2 --save {tmp_path}/saved --load {tmp_path}/saved"
    assert ran(pool.run(2, train, f"{flags} --exit-interval 2"))
    before = (tmp_path / "saved" / checkpoints.TRACKER).read_text()
    errors = pool.run(2, train, f"{flags} --exit-interval 4", fail_while_saving=True)
    assert all(f"could not be written (no space left on {tmp_path}/saved: " in error for error in errors)
    assert all(f"{tmp_path}/saved/iter_0000002 is complete and unchanged" in error for error in errors)
    assert (tmp_path / "saved" / checkpoints.TRACKER).read_text() == before
    assert (tmp_path / "saved" / "iter_0000004.incomplete").is_dir()
    assert ran(pool.run(2, train, f"{flags} --exit-interval 4"))
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["iter_0000002", "iter_0000004", checkpoints.TRACKER]


def test_garbage_collection_is_quick_while_training(pool: Pool, data: str) -> None:
    before, during, after = pool.run(1, frozen_objects, f"{data} --exit-interval 1")[0]
    assert before == after == 0
    assert during > 100_000, "what was imported, at least"


def frozen_objects(flags: str) -> tuple[int, int, int]:
    """How many objects the collector leaves out before, in and after a training."""
    gc.unfreeze()  # what the pool has frozen
    counts = [gc.get_freeze_count()]
    real_run = Iterations.run

    def run(*args: Any) -> Any:
        counts.append(gc.get_freeze_count())
        return real_run(*args)

    with patch.object(Iterations, "run", run):
        assert not train(flags, freezes=True)
    return counts[0], counts[1], gc.get_freeze_count()


def test_a_full_disk_for_metrics_and_what_was_measured_ends_no_training(pool: Pool, data: str, tmp_path: Path) -> None:
    measured = tmp_path / "measured"
    flags = f"{data} --metrics /dev/full --pipeline-trace {measured} --log-interval 1 --save {tmp_path}/saved"
    costs = f"--pipeline-costs profile --pipeline-costs-cache {measured}/costs.json"
    assert pool.run(1, train_on_full_disk, f"{flags} {costs}") == [""]
    assert Path("/dev/full").is_char_device() and not list(measured.rglob("*.json*"))
    assert (tmp_path / "saved" / "iter_0000006").is_dir()


def train_on_full_disk(flags: str) -> str:
    def write_text(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    package = "megatron.pipeline.session"
    with patch(f"{package}.trace.write_text", write_text), patch(f"{package}.planning.write_text", write_text):
        return train(flags)


def assert_perfetto_can_show(events: list[dict[str, Any]], ranks: int) -> None:
    """Measured and planned passes, with the measured waits in between: what overlaps in a row would be drawn nested."""
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"measured", "planned"}
    for process, rank in itertools.product((0, 1), range(ranks)):
        row = sorted(
            (event for event in slices if (event["pid"], event["tid"]) == (process, rank)), key=lambda event: event["ts"]
        )
        for before, after in itertools.pairwise(row):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.01, (before, after)
        kinds = Counter(event["cat"] for event in row)
        assert kinds["F"] == kinds["B"] == kinds["W"] == 4
        # What came, 4 activations or gradients, and what had not gone when the last pass was over.
        assert kinds["wait"] >= 4 if process == 0 else not kinds["wait"]
        assert any(event["ph"] == "C" and event["args"]["held"] > 0 for event in events if event["pid"] == process)


@pytest.mark.rest
def test_ramp_up_with_overlaps(pool: Pool, data: str, tmp_path: Path) -> None:
    flags = f"{data} --pipeline-model-parallel-size 2 --pipeline-schedule zb-v --use-distributed-optimizer "
    flags += "--rampup-batch-size 4 4 32 --global-batch-size 16 --attention-dropout 0 --hidden-dropout 0 --metrics"  # m 1 to 4
    for name, overlaps in (("plain", ""), ("overlapped", "--overlap-grad-reduce --overlap-param-gather")):
        assert ran(pool.run(4, train, f"{flags} {tmp_path}/{name}.jsonl --save {tmp_path}/{name} {overlaps}"))
        summary = json.loads((tmp_path / name / "iter_0000006" / "training.json").read_text())
        assert summary["consumed_samples"] == 4 + 4 + 4 + 8 + 8 + 12
    found, plain = (metrics(tmp_path / f"{name}.jsonl") for name in ("overlapped", "plain"))
    assert len(found) == 6 and found == plain


@pytest.mark.parametrize("flags", ["--tensor-model-parallel-size 2", ""], ids=["tensor x pipeline", "pipeline x data"])
def test_who_reads_what(pool: Pool, data: str, flags: str) -> None:
    found = dict(pool.run(4, batches, f"{data} --pipeline-model-parallel-size 2 {flags}", 2))
    assert all(all(tokens) for tokens in found.values()), "both pipeline ranks hold an end of the model"
    for (_, _, replica), tokens in found.items():
        assert tokens == found[0, 0, replica]
    replicas = [tokens for (tensor, pipeline, _), tokens in found.items() if (tensor, pipeline) == (0, 0)]
    assert len({json.dumps(tokens) for tokens in replicas}) == len(replicas), "data-parallel ranks read different samples"


def test_middle_stages_read_nothing(pool: Pool, data: str) -> None:
    found = dict(pool.run(4, batches, f"{data} --pipeline-model-parallel-size 4", 1))
    assert [bool(found[0, rank, 0][0]) for rank in range(4)] == [True, False, False, True]


def test_mock_data_starts_without_warnings(pool: Pool) -> None:
    """Upstream's, one for every split: that it does not keep in which order the made-up samples come."""
    assert pool.run(1, warned, "--mock-data") == [[]]


LARGE_VOCABULARY = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 2000 --untie-embeddings-and-output-weights --num-layers 8 "
    "--hidden-size 64 --seq-length 64 --micro-batch-size 1 --pipeline-model-parallel-size 4 --train-iters 3"
)


@pytest.mark.rest
def test_what_is_held_under_a_large_vocabulary_is_no_more_than_under_stock(pool: Pool, tmp_path: Path) -> None:
    """Measured on every rank: the last one's microbatches have logits, and there are as many of them as under 1F1B."""
    peaks = {}
    for name in ("stock", "zb-h1", "zb-v"):
        file = tmp_path / f"{name}.jsonl"
        assert ran(pool.run(4, train, f"{LARGE_VOCABULARY} --pipeline-schedule {name} --metrics {file}"))
        peaks[name] = json.loads(file.read_text().splitlines()[-1])["peak_activation_bytes"]
    assert max(peaks["zb-h1"]) <= max(peaks["stock"]) * 1.01
    assert max(peaks["zb-v"]) <= max(peaks["stock"]) * 1.01
    assert peaks["zb-h1"][3] > peaks["stock"][3], "its weight gradients do run later, as far as there is room"
