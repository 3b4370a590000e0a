"""Words that stand for no schedule of ours: in the place of a schedule's name, and of a transformation's. Numbers of things."""

STOCK = "stock"  # megatron-core's own schedule
FILE = "file:"  # before the path of a schedule, in place of a family's name
OFF = "off"  # neither --vocab-parallel nor --offload


def counted(number: float, thing: str) -> str:
    """Number and name of a thing: ``1 rank``, ``4 ranks``, ``1.5 microbatches``."""
    shown = f"{number:.4g}" if isinstance(number, float) else str(number)
    plural = "" if shown == "1" else "es" if thing.endswith("ch") else "s"
    return f"{shown} {thing}{plural}"
