"""What the patches of ``megatron.training`` call: one method in place of each upstream function."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any, Protocol


class Hooks(Protocol):
    """One training under a script of Megatron-LM; ``launch/run.py`` implements it.

    ``original`` is the upstream function that a patch has replaced; the arguments after it are that function's.
    """

    @property
    def shares_whole_batches(self) -> bool:
        """Whether tensor-parallel ranks need all of a batch, and not only the part that the first or the last rank uses."""

    def add_flags(self, parser: ArgumentParser) -> None:
        """Add flags to Megatron-LM's parser."""

    def validate(self, original: Callable[..., Any], args: Namespace, *rest: Any, **options: Any) -> Any:
        """Validate the flags."""

    def plan(self, args: Namespace) -> None:
        """Plan every iteration; the flags are complete, and no process group exists yet."""

    def configure(self, original: Callable[..., Any], args: Namespace, *rest: Any, **options: Any) -> Any:
        """Make the transformer's configuration."""

    def build(self, make: Callable[[Any, Any], Any], provider: Callable[..., Any]) -> Any:
        """Build this rank's chunks.

        Args:
            make: calls upstream's function, with a function that builds one chunk, and one ``(config, chunk)`` that wraps a chunk
                in lower precision; with None it leaves upstream's wrapper, and weight gradients are not delayed.
            provider: builds one chunk, as the script has it.
        """

    def needs_data(self, original: Callable[..., bool], vp_stage: int | None) -> bool:
        """Whether a chunk reads microbatches."""

    def train(self, original: Callable[..., Any], *rest: Any, **options: Any) -> Any:
        """Run the training loop."""

    def step(self, original: Callable[..., Any], training: Any, *rest: Any, **options: Any) -> Any:
        """Run one training iteration."""
