"""Costs of messages over single links, where not all links are alike, and how they are written."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

_WRITTEN = re.compile(r"(\d{1,4})(-|to)(\d{1,4})", re.ASCII)
_HOW = "a link is written 2-3 (both directions between ranks 2 and 3) or 2to3 (from rank 2 to rank 3 alone)"


class LinkCosts(NamedTuple):
    """Cost of a message from one rank to another: what a link that lacks bandwidth takes, and a delay, as of a way around.

    Attributes:
        seconds: for which the message of a microbatch occupies the link, so that later ones of this way stand in line; they grow
            with its tokens.
        latency: seconds besides, of any message; those of several messages overlap.
    """

    sender: int
    receiver: int
    seconds: float = 0.0
    latency: float = 0.0


def joined(links: Iterable[LinkCosts], others: Iterable[LinkCosts]) -> tuple[LinkCosts, ...]:
    """Links of both, sorted; where both have one, it is as in the second."""
    found = {(link.sender, link.receiver): link for link in (*links, *others)}
    return tuple(found[way] for way in sorted(found))


def read(name: str, latency: float, seconds: float = 0.0) -> list[LinkCosts]:
    """The links that a name such as ``2-3`` or ``2to3`` says; one number is a delay.

    Raises:
        ValueError: it says none.
    """
    if not (match := _WRITTEN.fullmatch(name)) or match[1] == match[3]:
        raise ValueError(f"link {name!r}: {_HOW}")
    ways = [(int(match[1]), int(match[3]))]
    if match[2] == "-":
        ways.append(ways[0][::-1])
    return [LinkCosts(*way, float(seconds), float(latency)) for way in ways]


def read_all(named: Iterable[tuple[str, float, float]]) -> tuple[LinkCosts, ...]:
    """The links of names with latencies and seconds, sorted.

    Raises:
        ValueError: as ``read``, or two names say the same way.
    """
    found: dict[tuple[int, ...], LinkCosts] = {}
    for name, latency, seconds in named:
        for link in read(name, latency, seconds):
            if link[:2] in found:
                raise ValueError(f"link {name}: a message from rank {link.sender} to rank {link.receiver} is given twice")
            found[link[:2]] = link
    return joined(found.values(), ())


def written(links: Iterable[LinkCosts]) -> dict[str, tuple[float, float]]:
    """Seconds and latency by the name of each link: one name for both directions where they are alike."""
    ways = {(link.sender, link.receiver): (link.seconds, link.latency) for link in links}
    found: dict[str, tuple[float, float]] = {}
    for (sender, receiver), cost in ways.items():
        if ways.get((receiver, sender)) != cost:
            found[f"{sender}to{receiver}"] = cost
        elif sender < receiver:
            found[f"{sender}-{receiver}"] = cost
    return found


def check(links: Iterable[LinkCosts], ranks: int) -> None:
    """Raises:
    ValueError: a rank is none of a pipeline's, or the two never talk on any placement: they are no neighbours in the ring.
    """
    for sender, receiver, *_ in links:
        if max(sender, receiver) >= ranks or (sender - receiver) % ranks not in (1, ranks - 1):
            some = f"0-1 to {ranks - 2}-{ranks - 1}, and {ranks - 1}-0" if ranks > 2 else "0-1 alone" if ranks > 1 else "none"
            raise ValueError(f"there is no link {sender}-{receiver}: links of {ranks} ranks are {some}")


def as_fields(links: Iterable[LinkCosts]) -> dict[str, Any]:
    """The links as a costs file has them: latency by name, or seconds and latency."""
    return {name: list(each) if each[0] else each[1] for name, each in written(links).items()}
