"""Only tests marked ``cuda`` see GPUs, and what lacks GPUs is skipped with the reason."""

from __future__ import annotations

import os

import gpus
import pytest
from pool import Pool


def visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_other_tests_and_their_ranks_see_no_gpu(pool: Pool) -> None:
    assert visible() == ""
    assert pool.run(2, visible) == ["", ""]


@pytest.mark.parametrize(
    ("wanted", "marks", "found", "reason"),
    [
        (1, "cuda", 1, None),
        (2, " cuda ", 8, None),
        (1, "not whole", 8, "needs a GPU, which this run hides"),
        (2, "", 0, "needs 2 GPUs, which this run hides"),
        (1, "cuda or slow", 1, "needs a GPU, which this run hides"),  # slow tests would compute on it, too
        (1, "cuda", 0, "needs a GPU, and torch sees none"),
        (4, "cuda", 2, "needs 4 GPUs, and torch sees 2"),
    ],
)
def test_who_runs_and_why_not(wanted: int, marks: str, found: int, reason: str | None) -> None:
    said = gpus.missing(wanted, marks, found)
    assert said == reason if reason is None or said is None else said.startswith(reason)


@pytest.mark.parametrize("wanted", [1, 3])
def test_a_marked_test_is_skipped_with_the_reason(request: pytest.FixtureRequest, wanted: int) -> None:
    request.node.add_marker(pytest.mark.cuda(devices=wanted))
    with pytest.raises(pytest.skip.Exception, match=r"^needs (a GPU|3 GPUs), which this run hides"):
        request.config.hook.pytest_runtest_setup(item=request.node)
