"""What comes between two iterations meets no step that is still open: evaluations, checkpoints, and every way to stop."""

from __future__ import annotations

from pathlib import Path

import pytest
from optimizer import injected_runs
from optimizer.injected_runs import POST, Injections
from pool import Pool

FLAGS = "--pipeline-model-parallel-size 4 --global-batch-size 8 --pipeline-schedule zb-h2 --hidden-dropout 0.1"
TROUBLE: Injections = {2: (3, 1e7), 6: (0, 1e7), 7: (2, 1e7), 12: (1, 1e7)}


@pytest.mark.rest
def test_evaluations_and_checkpoints(pool: Pool, data: str, tmp_path: Path) -> None:
    """Trouble in an iteration that something follows is found before that, and without any undone step."""
    around = "--eval-interval 3 --eval-iters 1 --save-interval 8"
    early = "--post-validation-copy host"  # copies made too early, of what a synchronous step then changes, are not used
    plain = pool.run(4, injected_runs.train, f"{data} {FLAGS} --eval-interval 3 --eval-iters 1", TROUBLE)
    ahead = pool.run(4, injected_runs.train, f"{data} {FLAGS} {around} --save {tmp_path}/ahead {POST} {early}", TROUBLE)
    for (told, digests, counts), (expected, same, _) in zip(ahead, plain, strict=True):
        assert (told, digests) == (expected, same)
        # Iterations 3, 6, 8, 9 and 12 are followed by something else.
        assert counts == {"ahead": 7, "undone": 2, "in vain": 2}
    (tmp_path / "ahead" / "latest_checkpointed_iteration.txt").write_text("8")
    resumed = pool.run(4, injected_runs.train, f"{data} {FLAGS} --load {tmp_path}/ahead {POST}", TROUBLE)
    for (told, digests, counts), (expected, same, _) in zip(resumed, plain, strict=True):
        assert told == expected[8:]
        assert digests == same
        assert counts == {"ahead": 3, "undone": 0, "in vain": 0}


@pytest.mark.rest
def test_a_termination_ends_after_the_iteration_in_which_it_came(pool: Pool, data: str, tmp_path: Path) -> None:
    """In iteration 5 forwards of the next one have begun and are dropped."""
    flags = f"{data} {FLAGS} --vocab-parallel 2"
    whole = pool.run(4, injected_runs.train, flags, TROUBLE)
    cut = pool.run(4, injected_runs.train, f"{flags} --save {tmp_path} {POST}", TROUBLE, terminate_in=5)
    rest = pool.run(4, injected_runs.train, f"{flags} --load {tmp_path} {POST}", TROUBLE)
    for first, second, (expected, same, _) in zip(cut, rest, whole, strict=True):
        assert len(first[0]) == 5
        assert first[0] + second[0] == expected
        assert second[1] == same
        # The forwards that are dropped follow the step of iteration 5, which stood.
        assert first[2] == {"ahead": 5, "undone": 1, "in vain": 2}


def test_forwards_on_parameters_that_will_not_stand_may_go_wrong(pool: Pool, data: str) -> None:
    """A step without clipping would make the next loss infinite: that ends no training."""
    flags = f"{data} --pipeline-model-parallel-size 2 --global-batch-size 8 --optimizer sgd --train-iters 4"
    plain = pool.run(2, injected_runs.train, flags, {2: (1, 1e30)})
    ahead = pool.run(2, injected_runs.train, f"{flags} {POST}", {2: (1, 1e30)})
    for (told, digests, counts), (expected, same, _) in zip(ahead, plain, strict=True):
        assert (told, digests) == (expected, same)
        assert counts == {"ahead": 3, "undone": 1, "in vain": 1}


def test_a_loss_that_stands_is_still_checked(pool: Pool, data: str) -> None:
    flags = f"{data} --pipeline-model-parallel-size 2 --global-batch-size 8 --clip-grad 0 --train-iters 4"
    _, error = pool.run(2, injected_runs.error_of, f"{flags} {POST}", {2: (1, float("nan"))})
    assert error.startswith("the loss of a microbatch is nan on rank 1")
