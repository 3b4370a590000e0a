"""A GPU that is not there: CPU memory that poses as a GPU's, under the product's unchanged code, and a checker of its order.

``pose()`` changes a process for good, so the processes of a pool of its own call it (``ranks.py``). From then on

- tensors made on "cuda" say that they are there, and compute in CPU memory: numbers are true (``posing.py``);
- ``torch.cuda`` has streams and events that compute nothing and order everything (``cuda.py``);
- process groups of "nccl" keep NCCL's rules and move data over gloo (``nccl.py``);
- ``trace.py`` records what the host hands to its device, and ``judge.py`` says of all ranks' traces whether they end together;
- ``memory.py`` finds every access, and every reuse of memory, that the streams do not order, by the vector clocks of
  ``order.py``. A finding names both places in the code.

``mutations.py`` takes one wait, event or ``record_stream`` out of the product at a time: each must be reported.
"""

from __future__ import annotations

from gpu_model.memory import Race
from gpu_model.posing import Device, device, pose

__all__ = ["Device", "Race", "device", "pose"]
