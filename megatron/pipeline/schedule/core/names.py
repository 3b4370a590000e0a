"""Words that stand for no schedule of ours: in the place of a schedule's name, and of a transformation's."""

STOCK = "stock"  # megatron-core's own schedule
OFF = "off"  # neither --vocab-parallel nor --offload
