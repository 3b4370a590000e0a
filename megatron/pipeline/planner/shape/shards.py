"""Shards of a vocabulary over ranks: which rows a shard has, and which of them count. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 8  # rows of every shard are a multiple of this, as kernels for products in 16 bits want it


@dataclass(frozen=True)
class Shards:
    """A vocabulary in shards of equal numbers of rows; the last ones may have rows that no vocabulary has.

    Attributes:
        size: tokens that the tokenizer knows.
        stock_rows: rows of the weights without vocabulary parallelism, as in checkpoints; those from ``size`` on are padding.
        count: number of shards.
        rows: of one shard.
        mask_padding: leave all rows from ``size`` on out of the softmax, not only those from ``stock_rows`` on.
    """

    size: int
    stock_rows: int
    count: int
    rows: int
    mask_padding: bool = False

    @classmethod
    def of(cls, size: int, stock_rows: int, count: int, mask_padding: bool = False) -> Shards:
        """Cut a vocabulary into as few rows per shard as there can be.

        Raises:
            ValueError: the vocabulary is empty or larger than its padded size, or there is no shard.
        """
        if not 0 < size <= stock_rows:
            raise ValueError(
                f"a vocabulary of {size} tokens in {stock_rows} rows: it must have at least one token and a row for each"
            )
        if count < 1:
            raise ValueError(f"a vocabulary in {count} shards: there must be at least one")
        rows = -(-stock_rows // (count * ALIGNMENT)) * ALIGNMENT
        return cls(size, stock_rows, count, rows, mask_padding)

    @property
    def total_counted(self) -> int:
        """Rows in the softmax, over all shards."""
        return self.size if self.mask_padding else self.stock_rows

    def own(self, index: int) -> range:
        """The rows of a shard, numbered through the whole vocabulary."""
        return range(index * self.rows, (index + 1) * self.rows)

    def counted(self, index: int) -> int:
        """Number of leading rows of a shard in the softmax."""
        return self._leading(index, self.total_counted)

    def stored(self, index: int) -> int:
        """Number of leading rows of a shard in checkpoints."""
        return self._leading(index, self.stock_rows)

    def _leading(self, index: int, end: int) -> int:
        return min(max(end - index * self.rows, 0), self.rows)
