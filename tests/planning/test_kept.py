"""Searched orders are kept on disk, and the next start reads them in place of a search."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reductions import costs as boundary_costs

from megatron.pipeline.planner.planning import kept, request
from megatron.pipeline.planner.planning.planned import Planned
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.passes import Order
from megatron.pipeline.planner.schedule.core.placement import v
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.families import FAMILIES

ASKED = Request("v-auto", 4, 6, costs=uniform(v(4)), memory_limit=3, keep=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where plans are kept, however short their search is."""
    monkeypatch.setattr(kept, "_WORTH", 0.0)
    monkeypatch.setenv(kept.FOLDER, str(tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of families that search from here on."""
    searched, solve = list[str](), request.solve

    def noted(name: str, problem: Problem) -> Schedule:
        searched.append(name)
        return solve(name, problem)

    monkeypatch.setattr(request, "solve", noted)
    return searched


def orders(planned: Planned) -> Any:
    return planned.schedule, planned.by_rules, planned.programs


@pytest.mark.parametrize(
    "asked",
    [
        ASKED,
        Request("zb-h1", 4, 6, costs=boundary_costs("zb-h1", 4), keep=True),
        replace(ASKED, schedule="zb-v", memory_limit=None),
    ],
)
def test_a_second_start_reads_what_the_first_has_searched(folder: Path, searches: list[str], asked: Request) -> None:
    first, second = asked.plan(), asked.plan()
    assert orders(first) == orders(second) and searches == [asked.schedule]
    [file] = folder.iterdir()
    assert json.loads(file.read_text())["schedule"] == asked.schedule == file.name.rpartition("-")[0]


@pytest.mark.parametrize(
    "other",
    [
        {"microbatches": 7},
        {"memory_limit": 4},
        {"costs": replace(uniform(v(4)), hop=0.1)},
        {"objective": "span"},
        {"fused": (0,)},
        {"schedule": "zb-v", "memory_limit": None},
    ],
)
def test_another_problem_is_planned_by_itself(folder: Path, searches: list[str], other: dict[str, Any]) -> None:
    ASKED.plan()
    replace(ASKED, **other).plan()
    assert len(searches) == len(list(folder.iterdir())) == 2


def test_another_release_plans_anew(folder: Path, searches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ASKED.plan()
    monkeypatch.setattr(kept, "_code", lambda: "another")
    ASKED.plan()
    assert len(searches) == len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("asked", [replace(ASKED, keep=False), replace(ASKED, quick=True)])
def test_plans_of_commands_and_quick_ones_are_not_kept(folder: Path, asked: Request) -> None:
    asked.plan()
    assert not folder.exists()


@pytest.mark.parametrize("variable", ["off", ""])
def test_it_can_be_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """Empty is as not given: the user's folder."""
    monkeypatch.setattr(kept, "_WORTH", 0.0)
    monkeypatch.setenv(kept.FOLDER, variable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ASKED.plan()
    assert len(list(tmp_path.glob("megatron-pipeline/plans/*.json"))) == (not variable)


def test_what_takes_no_time_to_search_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_WORTH", 60.0)
    ASKED.plan()
    assert not folder.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda _: "",
        lambda _: "[]",
        lambda _: "{}",
        lambda _: "\0\xff",
        lambda _: "[" * 200_000,
        lambda text: text.replace("F1.0", "F2.0", 1),
        lambda text: json.dumps(json.loads(text) | {"microbatches": 5}),
    ],
)
def test_a_damaged_file_is_replaced_with_a_line(
    folder: Path, searches: list[str], caplog: pytest.LogCaptureFixture, damage: Callable[[str], str]
) -> None:
    first = ASKED.plan()
    [file] = folder.iterdir()
    file.write_text(damage(whole := file.read_text()))
    assert orders(ASKED.plan()) == orders(first) and len(searches) == 2
    assert len(caplog.messages) == 1 and "holds no plan any more" in caplog.text
    assert file.read_text() == whole and orders(ASKED.plan()) == orders(first) and len(searches) == 2


def test_another_problems_file_under_this_name_is_not_taken(folder: Path, searches: list[str]) -> None:
    ASKED.plan()
    [mine] = folder.iterdir()
    replace(ASKED, memory_limit=4).plan()
    [other] = set(folder.iterdir()) - {mine}
    mine.write_text(other.read_text())
    ASKED.plan()
    assert len(searches) == 3


def full(_path: Path, _content: bytes) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("is_full", [False, True])
def test_a_folder_that_cannot_be_written_costs_a_line(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    if is_full:
        monkeypatch.setattr(Path, "write_bytes", full)
    else:
        folder.write_text("a file, and no folder")
    assert ASKED.plan().schedule.microbatches == 6
    assert len(caplog.messages) == 1 and "not kept for the next start" in caplog.text
    assert f"{kept.FOLDER} names another folder, or off" in caplog.text
    assert not is_full or not list(folder.iterdir()), "no part of a file stays"


def test_one_rank_of_a_node_writes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    ASKED.plan()
    assert not folder.exists()


def test_old_files_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_MOST", 3)
    for microbatches in range(2, 8):
        replace(ASKED, microbatches=microbatches).plan()
    left = sorted(json.loads(file.read_text())["microbatches"] for file in folder.iterdir())
    assert left == [5, 6, 7]


def test_other_files_in_the_folder_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_MOST", 1)
    folder.mkdir()
    for name in ("costs.json", "zb-v-best.json", "run-0123456789abcdef.json"):
        (folder / name).write_text("{}")
    for microbatches in range(2, 5):
        replace(ASKED, microbatches=microbatches).plan()
    assert len(list(folder.iterdir())) == 4


def test_a_family_of_the_users_own_is_planned_by_its_code_of_now(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("zb-h1", "zb-h2"):

        def plan(problem: Problem, name: str = name) -> Order:
            return FAMILIES[name].plan(problem)

        monkeypatch.setitem(FAMILIES, "mine", replace(FAMILIES[name], name="mine", plan=plan))
        own, given = (Request(one, 4, 9, keep=True).plan().schedule.passes for one in ("mine", name))
        assert own == given


def test_processes_of_one_number_on_nodes_that_share_the_folder_do_not_meet(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in containers, where all have the number 1: while one has yet to move its file into place, another writes."""
    monkeypatch.setattr("os.getpid", lambda: 1)
    whole = Path.replace

    def beside_another(part: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", whole)
        ASKED.plan()
        return whole(part, target)

    monkeypatch.setattr(Path, "replace", beside_another)
    ASKED.plan()
    assert not caplog.messages and len(list(folder.iterdir())) == 1
