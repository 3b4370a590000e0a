"""Where this rank computes."""

from __future__ import annotations

import torch


def this_device() -> torch.device:
    """The GPU that this process has set, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
