"""``make gpu``'s steps are a list: others stand in for them here, and what comes of each is a row of the page."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import gpu
import gpu_page
import pytest
import rehearse_llama
from common import save
from gpu import PYTHON, SAVED, Step
from gpu_page import BEGIN, END, Measured, Outcome, Row

ROOT = Path(__file__).parents[1]
MACHINE = {"device": "1 x Test | Device", "command": "`python scripts/gpu.py`"}


def step(name: str, code: str, **more: object) -> Step:
    return Step(name, (PYTHON, "-S", "-c", code, SAVED), **{"seconds": 20.0, **more})  # type: ignore[arg-type]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(f"# Head\n\n{BEGIN}\nold\n{END}\n\nend\n")
    return path


def run(steps: list[Step], tmp_path: Path, seconds: float = 60.0) -> list[list[Row]]:
    """The rows noted after each step, and in the end."""
    notes: list[list[Row]] = []
    end = time.monotonic() + seconds
    rows = gpu.run(steps, end, tmp_path / "logs", sys.executable, lambda rows: notes.append(list(rows)))
    return [*notes, rows]


def test_a_step_that_fails_is_a_row_and_the_rest_runs(tmp_path: Path) -> None:
    steps = [
        step("good", "print('3 passed, 1 skipped in 0.5s')", finds=gpu._COUNTS),
        step("bad", "print('1 failed in 2.0s'); print('why'); raise SystemExit(3)", finds=gpu._COUNTS),
        step("absent", "", program="no-such-program"),
        step("none", "print('9 skipped in 0.5s')", finds=gpu._COUNTS),
        step("last", "pass"),
    ]
    after_first, *_, rows = run(steps, tmp_path)
    assert [row.outcome for row in after_first] == [Outcome.PASSED, *[Outcome.NOT_REACHED] * 4]
    assert [row.outcome for row in rows] == [Outcome.PASSED, Outcome.FAILED, *[Outcome.SKIPPED] * 2, Outcome.PASSED]
    assert rows[0].found == "3 passed, 1 skipped in 0.5s"
    assert rows[1].found == "1 failed in 2.0s why (bad.log)"
    assert rows[2].found == "no-such-program is not installed" and rows[3].found == "9 skipped in 0.5s"
    assert gpu.exit_code(rows) == 1 and gpu.exit_code([rows[0], rows[2]]) == 0


def test_a_step_that_takes_too_long_ends_with_all_that_it_started(tmp_path: Path) -> None:
    """Also what has a session of its own, as torchrun's ranks do."""
    started = tmp_path / "started"
    child = "import time; time.sleep(100)"
    program = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', {child!r}], start_new_session=True); "
        f"open({str(started)!r}, 'w').write(str(p.pid)); p.wait()"
    )
    rows = run([step("slow", program, seconds=2.0)], tmp_path)[-1]
    assert rows[0].outcome is Outcome.RAN_OUT and gpu.exit_code(rows) == 1
    status = Path(f"/proc/{started.read_text()}/status")
    deadline = time.monotonic() + 20
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < deadline, "the step's child is still there"
        time.sleep(0.01)


def test_steps_for_which_no_time_is_left_are_not_reached(tmp_path: Path) -> None:
    rows = run([step("first", "pass")], tmp_path, seconds=0.0)[-1]
    assert [row.outcome for row in rows] == [Outcome.NOT_REACHED] and gpu.exit_code(rows) == 1


def test_medians_and_spread_come_from_what_a_benchmark_saves(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    save(str(saved), "Case | one", {"ours": [0.004, 0.001, 0.003, 0.002, 0.005], "single": [0.25]})
    save(None, "nothing", {"ours": [1.0]})
    copy = f"import sys; open(sys.argv[1], 'w').write({saved.read_text()!r})"
    (row,) = run([step("benchmark", copy)], tmp_path)[-1]
    assert row.measured[0] == Measured("Case | one", "ours", (0.004, 0.001, 0.003, 0.002, 0.005))
    text = gpu_page.report("", MACHINE, [row], [row.name])
    assert "\n### benchmark\n\nCase | one:\n" in text
    assert "| ours | 3.000 ms | 2.000 to 4.000 ms | 5 |" in text
    assert "| single | 250.000 ms | 250.000 to 250.000 ms | 1 |" in text
    assert "| run | device | command |" in text and "| 1 | 1 x Test \\| Device | `python" in text


def test_parts_fill_one_page() -> None:
    """Each run adds its rows and replaces those of the steps that it ran again; a run without a row left goes."""

    def ran(name: str, outcome: Outcome, *seconds: float) -> Row:
        return Row(name, outcome, 3.0, f"{name} | {outcome}", (Measured(f"Times of {name}", "way", seconds),) if seconds else ())

    order, text = ["tests", "kernels", "copies", "never"], "No GPU has run `make gpu` yet."
    for day, rows in (
        ("Monday", [ran("tests", Outcome.FAILED), Row("kernels", Outcome.NOT_REACHED)]),
        ("Tuesday", [ran("copies", Outcome.PASSED, 0.5), ran("kernels", Outcome.PASSED, 0.25)]),
        ("Wednesday", [ran("tests", Outcome.PASSED), Row("kernels", Outcome.NOT_REACHED)]),
    ):
        for noted in (rows[:1], rows):  # as after each step
            now = gpu_page.report(text, {"device": f"{day}'s | one", "date": day}, noted, order)
        text = now
    assert (
        text
        == """\
| run | device | date |
|---|---|---|
| 2 | Tuesday's \\| one | Tuesday |
| 3 | Wednesday's \\| one | Wednesday |

| step | run | outcome | took | found |
|---|---|---|---:|---|
| tests | 3 | passed | 3 s | tests \\| passed |
| kernels | 2 | passed | 3 s | kernels \\| passed |
| copies | 2 | passed | 3 s | copies \\| passed |

### kernels

Times of kernels:

| | median | middle half of the rounds | rounds |
|---|---:|---:|---:|
| way | 250.000 ms | 250.000 to 250.000 ms | 1 |

### copies

Times of copies:

| | median | middle half of the rounds | rounds |
|---|---:|---:|---:|
| way | 500.000 ms | 500.000 to 500.000 ms | 1 |"""
    )
    failed = gpu_page.report(text, {"device": "one", "date": "Thursday"}, [ran("copies", Outcome.FAILED)], order)
    assert "### copies" not in failed and "Times of kernels" in failed and "| 4 | one | Thursday |" in failed


def test_the_page_keeps_what_is_outside_the_markers(page: Path) -> None:
    gpu_page.write(page, "new\n\n| a |")
    gpu_page.write(page, "newer")
    assert page.read_text() == f"# Head\n\n{BEGIN}\nnewer\n{END}\n\nend\n"
    page.write_text("no markers")
    with pytest.raises(ValueError, match="does not have the lines"):
        gpu_page.write(page, "text")


def test_the_projects_page_has_a_place_for_the_tables_and_names_its_commands() -> None:
    text = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1 and text.index(BEGIN) < text.index(END)
    assert [f"scripts/gpu.py --part {part}\n" in text for part in gpu.PARTS] == [True] * len(gpu.PARTS)
    assert f"-d build/wheels {gpu.PACKAGES['megatron.core']}\n" in text


def test_without_a_gpu_nothing_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = page.read_text()
    assert gpu.main(["--page", str(page)], [step("never", "raise SystemExit(1)")]) == 2
    assert capsys.readouterr().err.startswith("no CUDA device: torch ") and page.read_text() == before


def test_all_of_it_with_other_steps(page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What asks for the device is replaced; the steps, the page and the exit code are the script's."""
    monkeypatch.setattr(gpu, "no_gpu", lambda: None)
    monkeypatch.setattr(gpu, "missing_packages", lambda: None)
    monkeypatch.setattr(gpu, "machine", lambda command: {"command": command})
    monkeypatch.setattr(gpu, "interpreter", lambda: sys.executable)
    steps = [step("one", "print('fine')", finds="fine"), step("two", "raise SystemExit(1)", part=2)]
    arguments = ["--page", str(page), "--minutes", "1"]
    assert gpu.main([*arguments, "--only", "one"], steps) == 0
    assert gpu.main([*arguments, "--part", "2"], steps) == 1
    text = page.read_text()
    assert "| one | 1 | passed |" in text and "| two | 2 | failed |" in text and "old" not in text
    assert "[1/1] two: at most" in capsys.readouterr().out
    assert gpu.main(arguments, steps) == 1
    assert "| one | 3 | passed |" in page.read_text() and "[2/2] two: at most" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpu.main(["--only", "three"], steps)


def test_says_which_wheels_to_bring_before_anything_runs(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "no_gpu", lambda: None)
    monkeypatch.setattr(gpu, "PACKAGES", {"megatron.no_such": "no-such==1.2", "sys": "there", "no_such_either": "either"})
    before = page.read_text()
    assert gpu.main(["--page", str(page)], [step("never", "raise SystemExit(1)")]) == 2
    first, _, download, _, install, path = capsys.readouterr().err.splitlines()
    assert first.endswith("no step runs without: no-such==1.2 either") and page.read_text() == before
    assert download.endswith("-d build/wheels no-such==1.2 either")
    assert f" --python-version 3.{sys.version_info.minor} --platform manylinux_2_28_" in download
    assert install.endswith("--target build/site build/wheels/*.whl") and path.endswith("PYTHONPATH=$PWD/build/site")


def test_the_steps_name_what_is_there() -> None:
    """Files; and together they may take no more than 30 minutes, a part no more than 9 with what comes before its steps."""
    for one in gpu.STEPS:
        for word in one.command:
            if word.endswith(".py") or word == "tests":
                assert (ROOT / word).exists(), word
    assert sum(one.seconds for one in gpu.STEPS) <= 30 * 60
    parts = {part: sum(one.seconds for one in gpu.STEPS if one.part == part) for part in gpu.PARTS}
    assert list(parts) == [1, 2, 3, 4, 5] and max(parts.values()) <= 9 * 60 - 30 and parts[1] <= 120
    assert [one.part for one in gpu.STEPS] == sorted(one.part for one in gpu.STEPS)
    assert len({one.name for one in gpu.STEPS}) == len(gpu.STEPS)


def test_a_rehearsal_is_one_line_of_the_page() -> None:
    def found(tokens: float, *off: float) -> dict[str, object]:
        ranks = [{"activation_bytes": 100.0 + one, "planned_activation_bytes": 100.0} for one in off]
        stock = {"iteration_seconds": 4.0}
        return {"tokens_per_second": tokens, "iteration_seconds": 2.0, "bubble_rate": 0.1, "ranks": ranks, "stock": stock}

    line = rehearse_llama.summary({"zb-v": found(1234.0, 0, 1), "v-half": found(5678.0, -2, 0)})
    assert line == "predicted tokens/s: zb-v 1,234, v-half 5,678; peaks within 2.0% of plan"
    assert rehearse_llama.row("zb-v", found(1234.0, 0, 1)) == ["zb-v", "1,234", "617", "10.0%", "1.0%", "0"]


@pytest.mark.parametrize(("gib", "layers"), [(8, 16), (80, 16), (141, 32), (500, 64)])
def test_a_model_is_rehearsed_that_fits(gib: float, layers: int) -> None:
    assert rehearse_llama.layers_that_fit(gib * 2**30) == layers
