"""Mamba-2 and gated delta net in plain torch: ``--spec reference_letters STACK``, for tests on CPUs.

megatron-core's own modules run; the kernels that they call are recurrences, token by token, in the place of GPU packages'.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.hybrid import hybrid_layer_specs  # noqa: F401  # which imports the modules of all letters
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


def _convolved(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Of each channel of [batch, token, channel], the last tokens up to each one, weighed."""
    channels, width = weight.shape
    padded = F.pad(rows.transpose(1, 2), (width - 1, 0))
    return F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=channels)).transpose(1, 2)


def mamba_split_conv1d_scan_combined(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    headdim: int,
    ngroups: int,
    **_: Any,
) -> torch.Tensor:
    """Mamba-2 of [batch, token, gate and x and B and C and step]."""
    heads, width = len(D), len(D) * headdim
    states = (projected.shape[-1] - 2 * width - heads) // (2 * ngroups)
    gate, mixed, step = projected.split([width, width + 2 * ngroups * states, heads], dim=-1)
    x, B, C = _convolved(mixed, weight, bias).split([width, ngroups * states, ngroups * states], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    B, C = (each.unflatten(-1, (ngroups, states)).repeat_interleave(heads // ngroups, dim=2) for each in (B, C))
    step = F.softplus(step + dt_bias)
    state, out = x.new_zeros(x.shape[0], heads, headdim, states), []
    for token in range(x.shape[1]):
        now = step[:, token, :, None, None]
        state = state * torch.exp(now * A[:, None, None]) + now * x[:, token, :, :, None] * B[:, token, :, None, :]
        out.append((state * C[:, token, :, None, :]).sum(-1) + D[:, None] * x[:, token])
    return torch.stack(out, dim=1).flatten(2) * F.silu(gate)


def chunk_gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """A gated delta net of [batch, token, head, channel]: what a state has of a key is replaced by the value, by ``beta``."""
    q = q * q.shape[-1] ** -0.5
    state, out = q.new_zeros(*q.shape[::2], q.shape[-1], v.shape[-1]), []
    for token in range(q.shape[1]):
        key, query = k[:, token, :, :, None], q[:, token, :, :, None]
        state = state * torch.exp(g[:, token, :, None, None])
        error = v[:, token] - (state * key).sum(-2)
        state = state + key * (beta[:, token, :, None] * error)[:, :, None, :]
        out.append((state * query).sum(-2))
    return torch.stack(out, dim=1).to(v.dtype), None


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **_: Any) -> tuple[torch.Tensor, None]:
    return _convolved(x, weight, bias), None


class ExtendedRMSNorm(torch.nn.Module):
    """A norm of groups of channels."""

    def __init__(self, size: int, eps: float, group_size: int, dtype: torch.dtype, **_: Any) -> None:
        super().__init__()
        self.weight, self.group, self.eps = torch.nn.Parameter(torch.ones(size, dtype=dtype)), group_size, eps

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(rows.unflatten(-1, (-1, self.group)), (self.group,), eps=self.eps).flatten(-2) * self.weight

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        state, groups = self.state_dict(prefix="", keep_vars=True), (metadata or {}).get("dp_cp_group")
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": 0}, sharded_offsets, tp_group=self.tp_group, dp_cp_group=groups
        )


_KERNELS = {
    "HAVE_MAMBA_SSM": True,
    "HAVE_FLA": True,
    "l2norm": lambda rows, **_: F.normalize(rows, dim=-1),
    **{
        each.__name__: each for each in (mamba_split_conv1d_scan_combined, chunk_gated_delta_rule, causal_conv1d, ExtendedRMSNorm)
    },
}
for name, module in list(sys.modules.items()):
    if name.startswith(("megatron.core.ssm.mamba_mixer", "megatron.core.ssm.gated_delta_net")):
        vars(module).update({kernel: value for kernel, value in _KERNELS.items() if kernel in vars(module)})
STACK = importlib.import_module("local_letters").STACK
