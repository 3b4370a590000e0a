"""The contract of ``mpipe``: commands, JSON fields, exit codes, one line for what is wrong."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command import output, refusal, report

from megatron.pipeline.cli import main
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timeline

ROOT = Path(__file__).parents[2]
PLAN = ["plan", "--schedule", "zb-h1", "--pp", "4", "--microbatches", "8"]


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    path = tmp_path / "zb-h1.json"
    assert main([*PLAN, "--cost", "F=1,B=1,W=1,comm=0.25", "--activation", "B=1,W=0.5", "--json", "-o", str(path)]) == 0
    return path


def test_a_plan_in_a_file_is_described_on_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = ["plan", "--schedule", "zb-v", "--pp", "2", "--microbatches", "2", "-o", str(path)]
    rest = "0.0% above the lower bound; memory 2 microbatches"
    assert output(capsys, *plan) == f"wrote {path}: zb-v with 2 chunks, makespan 6.5, {rest}\n"
    described = output(capsys, "plan", str(path), "--objective", "span", "-o", str(path))
    assert described == f"wrote {path}: zb-v with 2 chunks, span 6.5, 0.0% above the lower bound; memory 2 microbatches\n"


def test_a_file_with_braids_has_the_bound_and_the_times_of_its_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "braids.json"
    shape = ["--pp", "2", "--microbatches", "4", "--overlap-experts"]
    assert main(["plan", "--schedule", "dualpipe-v", *shape, "--json", "-o", str(path)]) == 0
    plan = json.loads(path.read_text())
    capsys.readouterr()
    again = report(capsys, "plan", str(path))
    assert plan["overlap"]["braids"] > 0
    for name in ("makespan", "makespan_lower_bound", "lower_bound", "gap", "makespan_gap"):
        assert again[name] == pytest.approx(plan[name]), name
    assert again["makespan_gap"] >= 0
    assert report(capsys, "certify", str(path))["makespan_unlimited"] == pytest.approx(plan["makespan"])


def test_a_file_says_of_which_order_rules_are(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its plan has moved W: rules are of the family's own order, which at other costs nobody knows."""
    path = str(tmp_path / "plan.json")
    shape = ["--schedule", "zb-v", "--pp", "4", "--microbatches", "4"]
    output(capsys, "plan", *shape, "--cost", "F=31,B=34,W=29,RS=96,AG=48,OPT=1,norm=1", "-o", path)
    plan = json.loads(Path(path).read_text())
    again = report(capsys, "plan", path)
    assert again["period_by_rules"] == plan["period_by_rules"] > plan["period"] == again["period"] >= again["period_lower_bound"]
    assert (
        again["period_lower_bound"] == plan["period_lower_bound"] > 4 * (31 + 34 + 29)
    )  # with what follows the passes of a rank
    other = "F=31,B=34,W=29,RS=200,AG=100,OPT=1,norm=1"
    changed = report(capsys, "plan", path, "--cost", other)
    assert "period_by_rules" not in changed and changed["period_by_rules_of_this_order"] > changed["period"]
    assert "period of this order of passes under the best of" in output(capsys, "plan", path, "--cost", other)


def test_replicas_count_for_a_file_as_for_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    replicas = "--cost F=1,B=1,W=1,OPT=0.5 --replicas 8 --grad-bytes 40GB --replica-link 50"
    path, plan = tmp_path / "plan.json", "plan --schedule 1f1b --pp 2 --microbatches 4"
    output(capsys, plan, "-o", str(path))
    planned = report(capsys, plan, replicas)
    again = report(capsys, "plan", str(path), replicas)
    assert again["costs"] == planned["costs"] and again["period"] >= planned["period"] > planned["span"]


@pytest.mark.parametrize("schedule", ["interleaved", "dualpipe-v"])
def test_a_plan_counts_what_communication_takes_from_computation(
    schedule: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On a machine where that is much, fewer passes are braided; a file of the plan says it, and equals it."""
    parts = "F.dispatch=0.3,F.experts=0.3,F.combine=0.3,B.combine=0.3,B.experts=0.3,B.dispatch=0.3,W.experts=0.4"
    plan, path = f"plan --schedule {schedule} --pp 2 --microbatches 6 --overlap-experts --json", tmp_path / "plan.json"
    found = [json.loads(output(capsys, *plan.split(), "--cost", f"{parts},beside_communication={k}")) for k in (1, 1.2, 100)]
    spans = [each["makespan"] for each in found]
    alone = json.loads(output(capsys, *plan.replace(" --overlap-experts", "").split(), "--cost", parts))["makespan"]
    assert spans[0] < spans[1] < spans[2] <= alone * (1 + 1e-9)
    assert found[1]["gap"] >= 0 and found[1]["costs"]["beside_communication"] == 1.2
    path.write_text(json.dumps(found[1]))
    assert report(capsys, "plan", str(path))["makespan"] == pytest.approx(spans[1])


def test_plan_json_has_the_fields_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    data = report(capsys, *PLAN, "--cost", "F=2,B=2,W=2,comm=0.5", "--memory-limit", "4")
    expected = {
        "schedule": "zb-h1",
        "pp": 4,
        "chunks": 1,
        "microbatches": 8,
        "costs": {"F": 2, "B": 2, "W": 2, "comm": 0.5},
        "activation": {"B": 1, "W": 1},
        "makespan": 60,
        "span": 60,
        "bubble_rate": 0.2,
        "span_bubble_rate": 0.2,
        "makespan_bubble_rate": 0.2,
        "peak_activation": [4, 4, 4, 4],
        "message_buffers": 11,
        "lower_bound": 60,
        "gap": 0,
        "makespan_lower_bound": 60,
        "makespan_gap": 0,
        "objective": "makespan",
        "memory_limit": 4,
        "sustaining_limit": 4,
        "placement": [[0], [1], [2], [3]],
    }
    assert {key: data[key] for key in expected} == expected
    assert data["plan_seconds"] >= 0
    assert data["passes"][0][:6] == ["F0.0", "F1.0", "F2.0", "F3.0", "B0.0", "W0.0"]
    assert set(data) == {*expected, "plan_seconds", "passes"}


def test_memory_is_counted_in_microbatches(capsys: pytest.CaptureFixture[str]) -> None:
    data = report(capsys, *PLAN, "--activation", "B=8,W=2", "--memory-limit", "4")
    assert data["peak_activation"] == [4, 3.25, 2.5, 1.75]


def test_a_report_counts_one_microbatch(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "plan", "--schedule", "zb-v", "--pp", "5", "--microbatches", "1")
    assert text.startswith("zb-v: 5 ranks with 2 chunks each, 1 microbatch\n")
    assert "no order within 1 microbatch has" in text and "1  microbatch on the fullest rank; by rank 1 1 1 1 1" in text
    assert "sustain" not in text


def test_a_limit_that_cannot_sustain_the_rate_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--schedule", "1f1b", "--pp", "4", "--cost", "comm=2", "--memory-limit"]
    many, all_fit = [*plan, "4", "--microbatches", "8"], [*plan, "2", "--microbatches", "2"]
    assert (
        "limit 4 cannot sustain the rate: the bubble grows with every microbatch; the smallest limit that could is 7 microbatches"
        in " ".join(output(capsys, *many).split())
    )
    assert "sustain" not in output(capsys, *all_fit)
    assert "sustain" not in output(capsys, *PLAN, "--memory-limit", "4")
    assert "sustain" not in output(capsys, *PLAN)


def test_the_other_commands_read_what_plan_wrote(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(planned.read_text())
    assert Schedule.from_json(planned.read_text()).passes[3][0].microbatch == 0
    obeys = f"{planned}: zb-h1 (4 ranks, 8 microbatches) obeys every rule; 96 passes and 48 sends, no deadlock\n\nzb-h1: 4 ranks,"
    assert output(capsys, "plan", str(planned)).startswith(obeys)
    again = report(capsys, "plan", str(planned))
    assert again == {key: value for key, value in data.items() if key != "plan_seconds"}
    slower = report(capsys, "plan", str(planned), "--cost", "comm=0.5")
    assert (data["span"], slower["span"]) == (30, 33)
    assert slower["costs"] == {"F": 1, "B": 1, "W": 1, "comm": 0.5}


def test_readable_summaries(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, *PLAN)
    assert text.startswith("zb-h1: 4 ranks, 8 microbatches\n")
    assert output(capsys, *PLAN[:3], "--pp", "1", "--microbatches", "8").startswith("zb-h1: 1 rank, ")
    assert "span        27  bubble 11.1%" in text
    assert "\nrank 3 ......F0B0F1" in text
    assert "by rank 4 3.5 3 2.5" in output(capsys, "plan", str(planned))
    drawn = output(capsys, "plan", str(planned), "--text")
    assert drawn.startswith("zb-h1\nrank 0 F0") and output(capsys, "plan", str(planned)).endswith(drawn.partition("\n")[2])
    assert output(capsys, *PLAN, "--text") == "zb-h1\n" + text.partition("\n\n")[2]
    lines = output(capsys, "plan", str(planned), str(planned), "--cost", "F=2").splitlines()
    assert [line for line in lines if "makespan" in line] == ["zb-h1: makespan 41", f"zb-h1 ({planned}): makespan 41"]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_draw_writes_pictures_of_schedules_and_recordings(planned: Path, tmp_path: Path, suffix: str) -> None:
    recorded = tmp_path / "measured.json"
    recorded.write_text('{"ranks": [[["F0.0", 100.5, 101.5], ["BW0.0", 101.5, 103]]]}')
    assert Timeline.from_json(recorded.read_text()).span == 2.5
    picture = tmp_path / f"picture.{suffix}"
    assert main(["plan", str(planned), str(planned), str(recorded), "--memory", "--draw", str(picture)]) == 0
    assert picture.stat().st_size > 5000


@pytest.mark.parametrize("cost", ["F=1", "F=1,RS=2,AG=1,OPT=1"], ids=["plain", "boundary"])
def test_a_plan_and_its_file_are_drawn_alike(capsys: pytest.CaptureFixture[str], tmp_path: Path, cost: str) -> None:
    first, second, third = (tmp_path / f"{name}.trace.json" for name in ("plan", "again", "exported"))
    plan, page = tmp_path / "plan.json", tmp_path / "page.html"
    said = output(capsys, *PLAN, "--cost", cost, "-o", str(plan), "--trace", str(first), "--draw", str(page))
    assert said.splitlines()[1:] == [f"wrote {page}", f"wrote {first}"]
    text = output(capsys, "plan", str(plan), "--text", "--trace", str(second))
    output(capsys, "export", str(plan), "-o", str(third))
    assert first.read_text() == second.read_text() == third.read_text()
    assert f'"title": "{text.splitlines()[0]}"' in page.read_text()
    assert report(capsys, "plan", str(plan), "--draw", str(page))["pp"] == 4, "no other word"


def test_draw_shows_what_a_recorded_iteration_was_planned_to_be(
    capsys: pytest.CaptureFixture[str], planned: Path, tmp_path: Path
) -> None:
    ran, plan = ([[["F0.0", begin, 2], ["BW0.0", 2, end]]] for begin, end in ((0.25, 4), (1, 3)))
    recorded = tmp_path / "iteration_0000005.json"
    recorded.write_text(json.dumps({"timeline": {"ranks": ran}, "planned": {"timeline": {"ranks": plan}}}))
    capsys.readouterr()  # of the fixture
    text = output(capsys, "plan", str(recorded), str(planned))
    titles = [line for line in text.splitlines() if line and not line.startswith(("rank", " "))]
    assert titles[:2] == ["iteration_0000005, planned: makespan 2", "iteration_0000005: makespan 3.75"] and len(titles) == 3
    for suffix in ("html", "png"):
        assert output(capsys, "plan", str(recorded), "--draw", str(tmp_path / f"page.{suffix}")).startswith("wrote ")
    entries = re.findall(r'"title": ?"(iteration_0000005(?:, planned)?)"', (tmp_path / "page.html").read_text())
    assert entries == ["iteration_0000005, planned", "iteration_0000005"]
    recorded.write_text(json.dumps({"timeline": {"ranks": ran}, "planned": 3}))
    assert f"{recorded}: not a timeline" in refusal(capsys, "plan", str(recorded))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: plan|certify|compare|check|export|memory"),
        (["tell"], "unknown command 'tell'; commands are plan, certify, compare, check, export"),
        ([*PLAN, "--replicas", "8"], "--replicas 8 needs the bytes of a rank's gradients: give --grad-bytes, such as 4GiB"),
        ([*PLAN, "--param-bytes", "1GB"], "--param-bytes 953.674MiB is of data-parallel replicas: give --replicas"),
        (
            [*PLAN, "--cost", "F=1,RS=1", "--replicas", "8", "--grad-bytes", "4GB"],
            "--cost RS=.. and --replicas 8 say the same: leave out one of them",
        ),
        (
            [*PLAN, "--cost", "F=1,norm=1"],
            "--cost norm=.. is of what ranks do between iterations: give RS, OPT or AG too, or leave it out",
        ),
        (["plam"], "unknown command 'plam'; did you mean plan? (see mpipe --help)"),
        (["-o", "export", "plan"], "a command comes before its flags: mpipe COMMAND -o ...; commands are plan, certify"),
        (["plan", "--schedul", "zb-h1", *PLAN[3:]], "unknown flag --schedul; did you mean --schedule? (see mpipe plan --help)"),
        ([*PLAN[:-2], "--microbatch", "8"], "unknown flag --microbatch; did you mean --microbatches?"),
        (["plan", "plan.json", "--pp", "3", "--fuse", "0"], "--pp, --fuse: these make a schedule, and a FILE has one"),
        (["export", "a", "b", "-o", "c.csv"], "export takes one FILE: leave b out (see mpipe export --help)"),
        (
            [*PLAN, "b"],
            "--schedule, --pp, --microbatches: these make a schedule, and a FILE has one: leave them out, or the FILE",
        ),
        (["plan", "a", "--json", "b"], "plan takes FILEs side by side: leave b out"),
        (["plan"], "required: --schedule, --pp, --microbatches; or the FILE of a schedule"),
        (["plan", "--schedule", "zb-h1", "--pp", "2"], "required: --microbatches; or the FILE of a schedule"),
        ([*PLAN, "--schedule", "zb_h1"], "dualpipe-v; did you mean zb-h1"),
        ([*PLAN, "--schedule", "Auot"], "dualpipe-v; did you mean auto or v-auto?"),
        ([*PLAN, "--pp", "0"], "--pp: expected a whole number of at least 1, got 0"),
        ([*PLAN, "--pp", "two"], "--pp: expected a whole number of at least 1, got 'two'"),
        ([*PLAN, "--pp", "9" * 30], "expected a whole number of at least 1 and at most 1,000,000,000,000,000, got 999"),
        ([*PLAN, "--chunks", "2"], "zb-h1 has 1 chunk per rank, got 2: leave --chunks out"),
        (["compare", *PLAN[3:], "--chunks", "0"], "--chunks: '0': expected whole numbers of at least 1, such as 2 or 2,4"),
        ([*PLAN, "--cost", "F=1ms"], "F=1ms: expected a number without a unit, such as F=1"),
        ([*PLAN, "--cost", "F=nan"], "F=nan: expected a number that is not negative, 0 or between"),
        ([*PLAN, "--cost", "F=1e300"], "between 1e-100 and 1e100"),
        ([*PLAN, "--cost", "X=1"], "unknown cost 'X'; allowed are F, B, W, comm"),
        ([*PLAN, "--cost", "F=1,F=2"], "at most once"),
        ([*PLAN, "--cost", "F"], "expected each of F, B, W, comm"),
        ([*PLAN, "--cost", "F=0,B=0,W=0"], "F, B and W of every stage take 0"),
        ([*PLAN, "--activation", "B=0"], "B=0,W=0: F must allocate"),
        ([*PLAN, "--memory-limit", "nan"], "'nan': expected a number of microbatches"),
        ([*PLAN, "--memory-limit", "12GiB"], "--memory-limit of 12GiB, but the costs do not count bytes: give --costs FILE"),
        ([*PLAN, "--memory-limit", "12 GiB"], "'12 GiB': expected a number of microbatches of at least 0, or bytes such as"),
        ([*PLAN, "-o", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json: there is no directory /nowhere/at"),
        (["plan", "/nowhere/at/all"], "cannot read /nowhere/at/all: No such file or directory"),
        (["plan", "/"], "cannot read /: Is a directory"),
        ([*PLAN, "-o", "plan.svg"], "plan.svg: the file name must end in .json or .txt; --draw writes .png, .svg"),
        ([*PLAN, "-o", "plan"], "cannot write plan: the file name must end in .json or .txt"),
        (["plan", "plan.json", "-o", "x.trace.json"], "cannot write x.trace.json: the file name must end in .json or .txt"),
        ([*PLAN, "--trace", "x.json"], "cannot write x.json: the file name must end in .trace.json"),
        ([*PLAN, "--memory"], "--memory is for pictures: add --draw OUT.png"),
        ([*PLAN, "--text", "--json"], "--text and --json say two ways to print"),
        ([*PLAN, "--consecutive"], "--consecutive joins what a training has recorded: name its iteration_*.json"),
        (["plan", "a", "b", "--trace", "x.trace.json"], "--trace is of one schedule or timeline: name one FILE"),
        (["plan", "a", "b", "--json"], "--json and -o are for the report of one schedule"),
        (["verify", "a.json", "--cost", "F=1"], "has become a part of mpipe plan: mpipe plan a.json --cost F=1"),
        (["simulate", "a.json", "-o", "b.json"], "mpipe simulate has become a part of mpipe plan: mpipe plan a.json -o b.json"),
        (["draw", "a.json", "b.json", "-o", "c d.svg"], "mpipe plan a.json b.json --draw 'c d.svg'"),
        (["draw", "a.json"], "mpipe plan a.json --text"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(capsys, shlex.join(arguments))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "invalid JSON"),
        (b"\x89PNG\xff", "is not a text file"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"ranks": []}', "ranks must be a list with the passes of at least one rank"),
        (b"{}", "missing schedule, placement, microbatches, passes"),
        (b'{"schedule": "x", "placement": [[0]], "microbatches": 1, "passes": [["F0.0"]]}', "rank 0: B0.0 is missing"),
        (b'{"schedule": "x", "placement": [[0]], "microbatches": 1, "passes": [["F0"]]}', "'F0' is not a pass"),
        (
            b'{"schedule": "x", "placement": [[0]], "microbatches": 1, "passes": [["F0.0", "BW0.0"]], "costs": 3}',
            "expected costs by name",
        ),
        (
            b'{"schedule": "x", "placement": [[0]], "microbatches": 1, "passes": [["F0.0", "BW0.0"]], "costs": {"F": "1"}}',
            "F='1': expected a number",
        ),
        (
            b'{"schedule": "x", "placement": [[0]], "microbatches": 1, "passes": [["F0.0", "BW0.0"]], "costs": {"F": NaN}}',
            "F=nan: expected a number",
        ),
    ],
)
def test_bad_files_are_one_line_and_exit_code_2(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    assert message in refusal(capsys, "plan", str(path))


def test_it_runs_as_a_module_and_bears_a_reader_that_leaves() -> None:
    command = [sys.executable, "-m", "megatron.pipeline.cli"]
    done = subprocess.run([*command, "plan"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    planning = " ".join([*command, *PLAN, "--microbatches", "2000", "--json"])
    piped = subprocess.run(["bash", "-c", f"{planning} | head -c 5"], capture_output=True, text=True, check=False)
    assert (piped.stdout, piped.stderr) == ('{"sch', "")


def test_the_bound_holds_where_only_some_microbatches_run_r(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = [f"F{m}.0" for m in range(5)] + [f"{kind}{m}.0" for m in range(5) for kind in ("R", "BW")] + ["F5.0", "BW5.0"]
    second = [f"{kind}{m}.0" for m in range(6) for kind in ("F", "BW")]
    path = tmp_path / "partial.json"
    told = {"schedule": "part", "placement": [[0], [1]], "microbatches": 6, "memory_limit": 1, "passes": [first, second]}
    path.write_text(json.dumps(told))
    for objective in ("span", "makespan"):
        text = output(capsys, "plan", str(path), "--cost", "F=1,B=1,W=1,R=0,comm=3", "--objective", objective, "--json")
        data = json.loads(text)
        assert data["lower_bound"] <= data["span"] and data["makespan_lower_bound"] <= data["makespan"]


def test_a_file_that_says_fused_of_split_backwards_is_not_believed(
    planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fused.json"
    path.write_text(json.dumps(json.loads(planned.read_text()) | {"fuse": [0, 1, 2, 3]}))
    data = report(capsys, "plan", str(path))
    assert data["lower_bound"] <= data["span"]
    path.write_text(json.dumps(json.loads(planned.read_text()) | {"memory_limit": 10**400}))
    assert "memory_limit must be a number between 0 and 1e100" in refusal(capsys, "plan", str(path))


def test_it_bears_a_missing_output() -> None:
    command = " ".join([sys.executable, "-m", "megatron.pipeline.cli", *PLAN])
    done = subprocess.run(["bash", "-c", f"{command} >&-"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_told_with_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full.json").symlink_to("/dev/full")
    assert main(f"plan --schedule 1f1b --pp 2 --microbatches 2 -o {tmp_path}/full.json".split()) == 2
    assert capsys.readouterr().err == f"mpipe: cannot write {tmp_path}/full.json: No space left on device\n"
