"""Models of how messages travel, and where a message stands in line behind another.

A rank's row is what its compute stream runs in order: passes, posts and waits. **A post does not block the row, a wait does.**
With NCCL in torch, ``isend`` and ``irecv`` put a kernel on the stream of a communicator, behind what the compute stream has been
given so far, and ``work.wait()`` makes the compute stream wait for that kernel; so a message starts no earlier than the pass
before its post has ended, receives as well (``ProcessGroupNCCL`` ``pointToPoint``, ``syncStream``, ``WorkNCCL::synchronize``).
With gloo the host waits instead, which is the same order. A wait stands where its file, runtime or program has it; torch's
pipelining runtime waits for a receive directly before the pass that needs it, and for sends at the end of the step
(``_PipelineScheduleRuntime._step_microbatches`` in torch 2.13).

A transport says which posts of a rank stand in one **line**. A line is a communicator on this rank: its operations run one after
another in the order of their posts, since torch has one stream for each communicator. A message travels while it is first in the
lines of both its ends, and takes one p2p latency. That the ends are first at the same time is what NCCL asks for: its send and
receive block the device until the other is there ("Point To Point Communication Functions" in the NCCL guide). NCCL has no
tags: the n-th send from a rank to another meets the n-th receive there, whichever tensors they are for.

Sources of each transport:

- ``rendezvous``: a send and its receive block both rows until the other is there: ``dist.send`` and ``dist.recv``, or waiting for
  each request at once.
- ``shared``: one communicator for all ranks of a pipeline. A group that was initialised with a ``device_id`` has it: "unbatched
  P2P ops are treated as independent collective ops, and are thus serialized with all other ops on this ProcessGroup", as torch
  warns.
- ``pair``: one communicator for two ranks, both directions. It is what unbatched operations on a group of more than two ranks get
  without a ``device_id``: a "new 2-rank NCCL communicator".
- ``direction``: a communicator for each (sender, receiver), as our runtime has with one group for messages to higher ranks and
  one to lower.
- ``batched``: one communicator, and the posts of a batch are one group (``batch_isend_irecv``, ``ncclGroupEnd``). Calls within a
  group "can be seen as progressing independently"; the group ends when all its operations have, and the next one starts then.
- ``batched-direction``: groups as well, on one communicator for messages to higher ranks and one to lower, as our runtime has
  with ``--pipeline-p2p batched``.
- ``queue``: a device that starts what it is given in order, messages and passes (``CUDA_DEVICE_MAX_CONNECTIONS=1``), so that a
  rank computes no further until its earlier messages are over and its own send is out, and until its receive is at the device.

**A cold start** adds what the first message needs. A communicator of two ranks is made when both hosts reach their first
operation on it, and the first message between two ranks in a direction has both hosts make a connection. Both block the *host*,
which otherwise runs ahead of its device. A group makes all its connections together, and ends only after the groups at the other
end of each have made all of theirs (``ncclTransportP2pSetup`` in NCCL's ``src/transport.cc``: it exchanges data with every new
peer, then signals every new peer).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from megatron.pipeline.planner.schedule.lower.program import starts_posted


@dataclass(frozen=True)
class TransportModel:
    """Way of posting: which posts stand in one line.

    Attributes:
        meaning: in a few words.
        line: from the sender and the receiver of a message to the communicator that it takes; None if posts block their row.
        grouped: whether posts in one line that nothing has started are one group.
        holds: whether the row goes on after a post only once that is first in its line and, if it sends, the message is out: its
            seconds are then those of the sender.
        made_by_pair: whether the two ranks of a communicator make it, at a cold start; otherwise all ranks make it before.
        starts: before which steps what has been posted starts, where posts are grouped.
    """

    name: str
    meaning: str
    line: Callable[[int, int], Hashable] | None
    grouped: bool = False
    holds: bool = False
    made_by_pair: bool = False
    starts: Callable[[Any], bool] = starts_posted


_ALL = (
    TransportModel("rendezvous", "a send and its receive block both ranks", None),
    TransportModel("shared", "one communicator for all ranks, in order", lambda sender, receiver: "all"),
    TransportModel("pair", "one communicator for two ranks, in order", lambda a, b: (min(a, b), max(a, b)), made_by_pair=True),
    TransportModel("direction", "one communicator for each sender and receiver", lambda a, b: (a, b), made_by_pair=True),
    TransportModel("batched", "groups on one communicator for all ranks", lambda sender, receiver: "all", grouped=True),
    TransportModel("batched-direction", "groups on one communicator for each direction", lambda a, b: a < b, grouped=True),
    TransportModel("queue", "messages and passes of a rank start in order", lambda sender, receiver: "all", holds=True),
)
TRANSPORTS = {each.name: each for each in _ALL}
