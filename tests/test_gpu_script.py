"""``make gpu``'s steps are a list: others stand in for them here, and what comes of each is a row of the page."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import gpu
import pytest
import rehearse_llama
from common import save
from gpu import PYTHON, SAVED, Measured, Outcome, Row, Step

ROOT = Path(__file__).parents[1]
MACHINE = {"device": "1 x Test | Device", "command": "`python scripts/gpu.py`"}


def step(name: str, code: str, **more: object) -> Step:
    return Step(name, (PYTHON, "-S", "-c", code, SAVED), **{"seconds": 20.0, **more})  # type: ignore[arg-type]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(f"# Head\n\n{gpu.BEGIN}\nold\n{gpu.END}\n\nend\n")
    return path


def run(steps: list[Step], tmp_path: Path, seconds: float = 60.0) -> list[list[Row]]:
    """The rows noted after each step, and in the end."""
    notes: list[list[Row]] = []
    rows = gpu.run(steps, seconds, tmp_path / "logs", sys.executable, lambda rows: notes.append(list(rows)))
    return [*notes, rows]


def test_a_step_that_fails_is_a_row_and_the_rest_runs(tmp_path: Path) -> None:
    steps = [
        step("good", "print('3 passed, 1 skipped in 0.5s')", finds=gpu._COUNTS),
        step("bad", "print('1 failed in 2.0s'); print('why'); raise SystemExit(3)", finds=gpu._COUNTS),
        step("absent", "", program="no-such-program"),
        step("last", "pass"),
    ]
    after_first, *_, rows = run(steps, tmp_path)
    assert [row.outcome for row in after_first] == [Outcome.PASSED, *[Outcome.NOT_REACHED] * 3]
    assert [row.outcome for row in rows] == [Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED, Outcome.PASSED]
    assert rows[0].found == "3 passed, 1 skipped in 0.5s"
    assert rows[1].found == "1 failed in 2.0s why (2.log)"
    assert rows[2].found == "no-such-program is not installed"
    assert gpu.exit_code(rows) == 1 and gpu.exit_code([rows[0], rows[2]]) == 0


def test_a_step_that_takes_too_long_ends_with_all_that_it_started(tmp_path: Path) -> None:
    started = tmp_path / "started"
    child = "import time; time.sleep(100)"
    program = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-S', '-c', {child!r}]); "
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
    text = gpu.report(MACHINE, [row])
    assert "| ours | 3.000 ms | 2.000 to 4.000 ms | 5 |" in text
    assert "| single | 250.000 ms | 250.000 to 250.000 ms | 1 |" in text
    assert "| device | 1 x Test \\| Device |" in text


def test_the_page_keeps_what_is_outside_the_markers(page: Path) -> None:
    gpu.write(page, "new\n\n| a |")
    gpu.write(page, "newer")
    assert page.read_text() == f"# Head\n\n{gpu.BEGIN}\nnewer\n{gpu.END}\n\nend\n"
    page.write_text("no markers")
    with pytest.raises(ValueError, match="does not have the lines"):
        gpu.write(page, "text")


def test_the_projects_page_has_the_markers(page: Path) -> None:
    text = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    page.write_text(text, encoding="utf-8")
    gpu.write(page, text.split(gpu.BEGIN)[1].split(gpu.END)[0].strip("\n"))
    assert page.read_text(encoding="utf-8") == text


def test_without_a_gpu_nothing_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = page.read_text()
    assert gpu.main(["--page", str(page)], [step("never", "raise SystemExit(1)")]) == 2
    assert capsys.readouterr().err.startswith("no CUDA device: torch ") and page.read_text() == before


def test_all_of_it_with_other_steps(page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What asks for the device is replaced; the steps, the page and the exit code are the script's."""
    monkeypatch.setattr(gpu, "no_gpu", lambda: None)
    monkeypatch.setattr(gpu, "machine", lambda command: {"command": command})
    steps = [step("one", "print('fine')", finds="fine"), step("two", "raise SystemExit(1)")]
    arguments = ["--page", str(page), "--minutes", "1"]
    assert gpu.main([*arguments, "--only", "one"], steps) == 0
    assert gpu.main(arguments, steps) == 1
    text = page.read_text()
    assert "| one | passed |" in text and "| two | failed |" in text and "old" not in text
    assert "[2/2] two: at most" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpu.main(["--only", "three"], steps)


def test_the_steps_name_what_is_there() -> None:
    """Files; and together they may take no more than 30 minutes."""
    for one in gpu.STEPS:
        for word in one.command:
            if word.endswith(".py") or word == "tests":
                assert (ROOT / word).exists(), word
    assert sum(one.seconds for one in gpu.STEPS) <= 30 * 60
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
