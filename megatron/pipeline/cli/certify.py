"""``mpipe certify``: whether a schedule from anywhere hangs, over each way in which messages travel."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

from megatron.pipeline.cli.arguments import Commands, add_command, cost_flags, names, report_flags, size_flags
from megatron.pipeline.cli.request import changes
from megatron.pipeline.cli.summary import check_output, write
from megatron.pipeline.flags.flag_types import positive_int
from megatron.pipeline.planner import SLACK, counted, traffic

MEGATRON = "interleaved"  # in place of a file: megatron-core's own
MOST_FORWARDS = 100_000  # of it, on all ranks: what takes a minute
_ITS_FLAGS = ("--no-overlap-p2p-communication", "--variable-seq-lengths")


def add(commands: Commands) -> None:
    help = "say for each transport whether a schedule hangs, and where"
    listed = "; ".join(f"{each.name}: {each.meaning}" for each in traffic.TRANSPORTS.values())
    report = report_flags("one JSON object", "write there instead of to the terminal: .json, or .txt for text")
    parser = add_command(
        commands,
        "certify",
        help,
        run,
        "mpipe certify plan.json --cold",
        "mpipe certify torch.csv --transport pair,direction",
        f"mpipe certify {MEGATRON} --pp 4 --chunks 2 --microbatches 8 --cold",
        description=f"{help}. Exit code: 0 if nothing hangs, 1 if something does, 2 for bad input.",
        parents=[size_flags(required=False), cost_flags(), report],
    )
    parser.flag("file", "what mpipe plan --json wrote; .csv of torch.distributed.pipelining, passes alone or with communication; "
        f"or {MEGATRON}: megatron-core's own, which alone takes sizes and Megatron-LM's two flags",
        str, metavar="FILE")  # fmt: skip
    parser.add_argument("--chunks", type=positive_int, metavar="V", help="chunks of a rank (default: 2; 1 is 1F1B)")
    for flag in _ITS_FLAGS:
        parser.add_argument(flag, action="store_true", help=f"messages of {MEGATRON} as with this flag of Megatron-LM")
    parser.add_argument("--transport", type=names, metavar="NAME,..", help=f"only these (default: all). {listed}")
    parser.flag("--cold", "as in a first iteration: communicators and connections are made at the first message")


def run(options: argparse.Namespace) -> int:
    """Returns 1 if anything hangs over one of the transports, or messages are swapped; else 0."""
    check_output(options)
    transports = _transports(options.transport)
    source = _source(options)
    certificate = source.certify(transports, options.cold)
    write(_fields(source, certificate, options.cold), lambda: "\n".join(_text(source, certificate, options.cold)), options)
    return int(certificate.hangs)


def _source(options: argparse.Namespace) -> traffic.TrafficSource:
    flags, sizes = changes(options).costs, (options.pp, options.microbatches)
    overlap, shapes = not options.no_overlap_p2p_communication, options.variable_seq_lengths
    if options.file != MEGATRON:
        if any((*sizes, options.chunks, shapes, not overlap)):
            others = ", ".join(_ITS_FLAGS)
            raise ValueError(
                f"--pp, --microbatches, --chunks, {others} are for {MEGATRON}: leave them out, a file says it itself"
            )
        return traffic.read_traffic(options.file, flags)
    if None in sizes:
        raise ValueError(f"{MEGATRON} needs --pp and --microbatches; a file of that name is ./{MEGATRON}")
    if options.pp < 2:
        raise ValueError(f"--pp {options.pp}: one rank sends no messages, and {MEGATRON} needs 2 or more")
    if math.prod((*sizes, options.chunks or 2)) > MOST_FORWARDS:
        raise ValueError(
            f"--pp {options.pp}, --chunks {options.chunks or 2}, --microbatches {options.microbatches} are over {MOST_FORWARDS} "
            "forwards; take fewer: what hangs does so with few microbatches"
        )
    return traffic.megatrons(flags, sizes, options.chunks, overlap, shapes)


def _transports(asked: list[str] | None) -> list[traffic.TransportModel]:
    for name in asked or ():
        if name not in traffic.TRANSPORTS:
            raise ValueError(f"unknown transport {name!r}; they are {', '.join(traffic.TRANSPORTS)}")
    return [each for name, each in traffic.TRANSPORTS.items() if not asked or name in asked]


def _fields(source: traffic.TrafficSource, certificate: traffic.Certificate, cold: bool) -> dict[str, Any]:
    whole = certificate.traffic
    return {
        "schedule": whole.name,
        "pp": whole.ranks,
        "chunks": whole.placement.chunks,
        "microbatches": whole.microbatches,
        "messages": source.how,
        "cold": cold,
        "hangs": certificate.hangs,
        "swapped": list(certificate.swapped),
        "makespan_unlimited": certificate.unlimited,
        "transports": {outcome.transport.name: _outcome(outcome, certificate.unlimited) for outcome in certificate.outcomes},
    }


def _outcome(outcome: traffic.TransportOutcome, unlimited: float | None) -> dict[str, Any]:
    hang = outcome.hang
    return {
        "hangs": hang is not None,
        "makespan": outcome.makespan,
        "waiting": None if outcome.makespan is None or unlimited is None else outcome.makespan - unlimited,
        "cycle": [blocked.fields() for blocked in hang.chain] if hang and not hang.missing else None,
        "chain": [blocked.fields() for blocked in hang.chain] if hang and hang.missing else None,
    }


def _text(source: traffic.TrafficSource, certificate: traffic.Certificate, cold: bool) -> Iterator[str]:
    whole, unlimited = certificate.traffic, certificate.unlimited
    chunks = f" with {whole.placement.chunks} chunks each" if whole.placement.chunks > 1 else ""
    start = ", cold start" if cold else ""
    size = f"{counted(whole.ranks, 'rank')}{chunks}, {counted(whole.microbatches, 'microbatch')}"
    yield f"{whole.name}: {size}; {source.how}{start}"
    wide = max(len(outcome.transport.name) for outcome in certificate.outcomes)
    for outcome in certificate.outcomes:
        yield f"  {outcome.transport.name:<{wide}}  {_verdict(outcome, unlimited)}"
    for swapped in certificate.swapped:
        yield f"swapped: {swapped}"
    hangs: dict[tuple[str, ...], list[str]] = {}  # by what a chain says, the transports
    for outcome in certificate.outcomes:
        if outcome.hang:
            hangs.setdefault(tuple(_chain(outcome.hang)), []).append(outcome.transport.name)
    for chain, over in hangs.items():
        yield f"the hang over {', '.join(over)}:"
        yield from chain


def _verdict(outcome: traffic.TransportOutcome, unlimited: float | None) -> str:
    if outcome.makespan is None:
        return "HANGS"
    text = f"does not hang; makespan {outcome.makespan:g}"
    if unlimited and outcome.makespan > unlimited * (1 + SLACK):
        text += f", {outcome.makespan / unlimited - 1:.1%} above {unlimited:g}, where messages never wait"
    return text


def _chain(hang: traffic.Hang) -> Iterator[str]:
    for number, blocked in enumerate(hang.chain):
        yield f"  {'waits for ' if number else ''}{blocked}"
    if not hang.missing:
        first = hang.chain[0]
        yield f"  waits for rank {first.rank}, as above"
