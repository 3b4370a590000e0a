"""Schedules of ``torch.distributed.pipelining``: every class, and the hangs that were reported of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from marked import rest, whole
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from megatron.pipeline.planner.planning.costs import CostFlags
from megatron.pipeline.planner.planning.traffic import read_traffic
from megatron.pipeline.planner.schedule.certify.certificate import Certificate, certify
from megatron.pipeline.planner.schedule.certify.torch_comms import from_comms_csv
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.rules.transports import TRANSPORTS

SINGLE = ("GPipe", "1F1B")
MULTI = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def compute_only(name: str, ranks: int, microbatches: int) -> list[list[str]]:
    ops = get_schedule_ops(name, ranks, microbatches)
    return [["" if action is None else str(action) for action in row] for row in ops]


def with_messages(name: str, ranks: int, microbatches: int, defer: bool = False) -> list[list[str]]:
    """What torch's runtime lowers the schedule to."""
    chunks = 1 if name in SINGLE else 2

    def home(stage: int) -> int:
        return 2 * ranks - 1 - stage if name in V_SHAPED and stage >= ranks else stage % ranks

    actions = {rank: [*filter(None, row)] for rank, row in enumerate(get_schedule_ops(name, ranks, microbatches))}
    lowered = torch_schedules._add_send_recv(actions, home, ranks * chunks)
    if defer:
        lowered = torch_schedules._defer_recv_ops(lowered, home)
    return [[str(action) for action in lowered[rank]] for rank in range(ranks)]


def text(rows: Sequence[Sequence[str]]) -> str:
    return "".join(",".join(row) + "\n" for row in rows)


def certified(rows: Sequence[Sequence[str]], hop: float = 0.0, cold: bool = False) -> Certificate:
    traffic = from_comms_csv(text(rows), "torch")
    return certify(traffic, uniform(traffic.placement, hop=hop), cold=cold)


def hanging(certificate: Certificate) -> set[str]:
    return {each.transport.name for each in certificate.outcomes if each.hang}


def above(certificate: Certificate) -> dict[str, float]:
    """By transport, what its lines add to the makespan."""
    assert certificate.unlimited is not None
    return {
        each.transport.name: each.makespan - certificate.unlimited for each in certificate.outcomes if each.makespan is not None
    }


def sizes(name: str, ranks: int) -> list[int]:
    """Microbatches that a class takes."""
    least = {"1F1B": ranks, "DualPipeV": 2 * ranks}.get(name, 1)
    return [count for count in (1, ranks, 2 * ranks) if count >= least]


def test_these_are_all_classes() -> None:
    known = {"Schedule" + name for name in (*SINGLE, *MULTI)}
    public = {name for name in vars(torch_schedules) if name.startswith("Schedule")}
    assert public == known


@pytest.mark.parametrize("ranks", [*range(2, 5), *map(whole, range(5, 8)), rest(8)])
@pytest.mark.parametrize("name", ["GPipe", *MULTI])
def test_no_class_hangs(tmp_path: Path, name: str, ranks: int) -> None:
    """Over no transport, in a first step or later. As our training posts the passes, a single microbatch alone hangs the first
    step where send and receive are one group on one communicator, which it does not have: see torchtitan issue 775."""
    for microbatches in sizes(name, ranks):
        for rows in (with_messages(name, ranks, microbatches), passes := compute_only(name, ranks, microbatches)):
            path = tmp_path / "torch.csv"
            path.write_text(text(rows))
            source = read_traffic(str(path), CostFlags())
            for cold in (False, True):
                certificate = certify(source.traffic, source.costs, cold=cold)
                assert hanging(certificate) <= ({"batched"} if cold and rows is passes and microbatches == 1 else set())
                assert certificate.swapped == ()
                assert certificate.unlimited is not None


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("name", MULTI)
def test_deferred_receives_hang_where_opposite_messages_share_a_line(name: str, ranks: int) -> None:
    """``defer_pp_recv=True`` of torch 2.13. With 2 or more microbatches for each rank, every class hangs over one
    communicator."""
    certificate = certified(with_messages(name, ranks, 2 * ranks, defer=True))
    assert {"rendezvous", "shared"} <= hanging(certificate)
    assert "direction" not in hanging(certificate)


def late(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Every receive directly before its pass, as pytorch pull request 172833 had it."""
    moved = []
    for row in rows:
        receives = {cell for cell in row if "RECV" in cell}
        new: list[str] = []
        for cell in row:
            if cell in receives:
                continue
            wanted = {cell.replace("F", "RECV_F")} if "SEND" not in cell else set()
            wanted |= {cell.replace(kind, "RECV_B") for kind in ("B", "I") if "SEND" not in cell}
            new += [*sorted(wanted & receives), cell]
        moved.append(new)
    return moved


def swapped_on_odd_ranks(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """A receive goes before the sends that stand directly before it."""
    changed = [list(row) for row in rows]
    for row in changed[1::2]:
        for place in range(1, len(row)):
            at = place
            while "RECV" in row[at] and "SEND" in row[at - 1]:
                row[at - 1], row[at] = row[at], row[at - 1]
                at -= 1
    return changed


def test_receives_directly_before_their_passes_hang_two_nodes() -> None:
    """pytorch issue 172668: pp 2, 4 stages. The author's two nodes are stuck at 0SEND_F1 and 1SEND_F0, each before a receive from
    the other; receives first on odd ranks end at 0SEND_F2 and 3SEND_B0 instead."""
    rows = late(with_messages("Interleaved1F1B", 2, 4))
    assert rows[0][rows[0].index("2RECV_F0") - 1 :][:3] == ["0SEND_F1", "2RECV_F0", "2F0"]
    assert rows[1][rows[1].index("1RECV_F1") - 1 :][:3] == ["1SEND_F0", "1RECV_F1", "1F1"]
    certificate = certified(rows)
    assert hanging(certificate) >= {"rendezvous", "shared", "pair"}
    assert "direction" not in hanging(certificate)
    hang = next(each for each in certificate.outcomes if each.transport.name == "pair").hang
    assert hang is not None
    assert sorted(blocked.what for blocked in hang.chain) == [
        "Send of the activation of microbatch 0 from stage 1 to rank 0",
        "Send of the activation of microbatch 1 from stage 0 to rank 1",
    ]
    again = certified(swapped_on_odd_ranks(rows))
    hang = next(each for each in again.outcomes if each.transport.name == "pair").hang
    assert hang is not None
    assert sorted(blocked.what for blocked in hang.chain) == [
        "Send of the activation of microbatch 2 from stage 0 to rank 1",
        "Send of the gradient of microbatch 0 from stage 3 to rank 0",
    ]


def test_receives_in_front_delay_the_warm_up_on_one_communicator() -> None:
    """pytorch issues 188833 and 195760: pp 8, 2 stages a rank. In warm-up rank 0 has 8RECV_F0, which rank 7 sends late, before
    sends to rank 1 that are ready. It is a delay and no hang, and communicators of two ranks do not have it."""
    rows = with_messages("Interleaved1F1B", 8, 16)
    assert rows[0].index("8RECV_F0") < rows[0].index("0SEND_F7")
    certificate = certified(rows, hop=0.1)
    assert not certificate.hangs
    assert certificate.unlimited is not None
    lines = above(certificate)
    assert lines["shared"] / certificate.unlimited == pytest.approx(0.543, abs=0.001)
    assert lines["direction"] == pytest.approx(0)


ROWS = ["0F0,0SEND_F0,0RECV_B0,0I0,0W0", "1RECV_F0,1F0,1I0,1SEND_B0,1W0"]


def test_weights_and_overlapped_pairs_are_read() -> None:
    ends = "0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD"
    rows = [f"0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,{ends}", "1UNSHARD,1RECV_F0,(1F0;1B0)OVERLAP_F_B,1SEND_B0"]
    traffic = from_comms_csv("\n".join(rows) + "\n", "own")
    assert (traffic.ranks, traffic.microbatches, traffic.placement.chunks) == (2, 1, 1)
    assert not certify(traffic, uniform(traffic.placement)).hangs


def test_waits_for_sends_are_read() -> None:
    """torch 2.15 can have WAIT_SEND_F and WAIT_SEND_B in a schedule: nothing after one starts before the message has arrived."""
    first = "0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0,0WAIT_SEND_F0,0RECV_B1,0B1,0WAIT_SEND_F1"
    last = "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1WAIT_SEND_B1"
    assert hanging(certified([first.split(","), last.split(",")], cold=True)) == set()
    early = first.replace("0RECV_B0,0SEND_F1", "0SEND_F1,0WAIT_SEND_F1,0RECV_B0").removesuffix(",0WAIT_SEND_F1")
    certificate = certified([early.split(","), last.split(",")])
    assert hanging(certificate) == set(TRANSPORTS)
    hang = next(each.hang for each in certificate.outcomes if each.transport.name == "direction")
    assert hang is not None
    assert [blocked.what.split(" of ")[0].split(" for ")[0] for blocked in hang.chain] == ["Wait", "Send", "Wait", "Send"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("0SEND_F0", "0WAIT_SEND_F0", "line 1, cell 2: 0WAIT_SEND_F0 needs 0SEND_F0 before it on this line"),
        ("0F0", "0G0", "line 1, cell 1: '0G0' is neither a pass nor communication"),
        ("0SEND_F0", "0SEND_F", "line 1, cell 2: '0SEND_F' is neither a pass nor communication"),
        ("0SEND_F0,", "0SEND_F0,0SEND_F0,", "line 1, cell 3: 0SEND_F0 is there twice; remove one"),
        ("0F0,0SEND_F0", "0SEND_F0,0F0", "line 1, cell 1: 0SEND_F0 needs 0F0 before it on this line"),
        ("1RECV_F0,", "", "line 2, cell 1: 1F0 needs 1RECV_F0 before it on this line"),
        ("1F0,1I0", "1I0,1F0", "line 2, cell 2: 1I0 needs 1F0 before it on this line"),
        ("0RECV_B0", "1RECV_B0", "line 1, cell 3: 1RECV_B0: rank 0 does not hold stage 1"),
        ("1SEND_B0", "1SEND_F0", "line 2, cell 4: 1SEND_F0: there is no stage 2"),
        ("1W0", "0W0", "line 2, cell 5: stage 0 is on rank 1 here and on rank 0 before; keep one"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(old: str, new: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(says)}"):
        from_comms_csv("\n".join(ROWS).replace(old, new) + "\n", "own")


def test_a_message_between_stages_of_one_rank_is_refused() -> None:
    rows = with_messages("ZBVZeroBubble", 2, 4)
    place = rows[1].index("1F0")
    with pytest.raises(ValueError, match=r"1SEND_F0: stage 2 is on the same rank"):
        certified([rows[0], [*rows[1][: place + 1], "1SEND_F0", *rows[1][place + 1 :]]])


def test_every_line_needs_passes() -> None:
    with pytest.raises(ValueError, match="the CSV has no passes"):
        from_comms_csv("0SEND_F0\n1RECV_F0\n", "own")
    with pytest.raises(ValueError, match="rank 1 has no passes"):
        from_comms_csv("0F0,0SEND_F0\n1RECV_F0\n", "own")


def test_a_missing_message_hangs() -> None:
    certificate = certified([row.replace("0SEND_F0,", "").split(",") for row in ROWS])
    assert hanging(certificate) == {each.transport.name for each in certificate.outcomes}
