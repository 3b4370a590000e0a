"""Mamba-2: a convolution over a few tokens, and a state for each head that tokens read and write one after another."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

CHUNK = 128  # tokens within which the state is left out: products of all with all, as megatron-core's kernel has it
_TAPS = 4  # tokens of the convolution


@dataclass(frozen=True)
class Mamba:
    """Sizes of a layer; a ``Mixer`` (``hybrid``).

    Dao and Gu, "Transformers are SSMs", sections 6 and 7: a layer's first linear makes the gate, the inputs, what groups of heads
    write to and read from their states, and a step for each head. B makes the convolution and the states of chunks again.

    Attributes:
        heads, head_width: of the inputs.
        groups: of heads that write and read alike.
        state: numbers of the state for each channel.
    """

    heads: int
    head_width: int
    groups: int
    state: int

    @classmethod
    def of(cls, args: Namespace) -> Mamba:
        """From Megatron-LM's flags; without a number of heads, they are twice as wide as hidden states together."""
        width = args.mamba_head_dim
        return cls(args.mamba_num_heads or 2 * args.hidden_size // width, width, args.mamba_num_groups, args.mamba_state_dim)

    @property
    def mixed(self) -> int:
        return self.heads * self.head_width

    @property
    def convolved(self) -> int:
        """Width of what the convolution makes."""
        return self.mixed + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        return self.mixed + self.convolved + self.heads

    @property
    def kept(self) -> int:
        """What the states give before and after the gate."""
        return 2 * self.mixed

    @property
    def parameters(self) -> int:
        """Taps and biases of the convolution, three numbers for each head, and a norm."""
        return (_TAPS + 1) * self.convolved + 3 * self.heads + self.mixed

    @property
    def operations(self) -> tuple[float, float]:
        """Products within chunks, and with states, which are written and read."""
        forward = 2 * CHUNK * (self.groups * self.state + self.mixed) + 4 * self.state * self.mixed
        return forward, 3 * forward

    @property
    def moved(self) -> tuple[float, float]:
        """Each kernel reads what it takes and writes what it makes; states of chunks, in float32, are passed on once."""
        states = 8 * self.mixed * self.state / CHUNK
        forward = 4 * self.convolved + 5 * self.mixed + states
        return forward, 3 * forward
