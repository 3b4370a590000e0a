"""Pipeline schedules for today's megatron-core, without a fork.

The rooms, in the order data flows through them:

``schedule``  what runs when: passes, placements, families, simulation, proof, lowering. Never imports torch.
``runtime``   how one rank runs its program: executor, p2p, weight gradients, measurements.
``model``     the GPT model cut by a placement, with linears whose backward splits.
``training``  arguments, data, checkpoints, the loop: the glue behind ``pretrain_gpt.py``.
``launch``    Megatron-LM's own scripts, unchanged, under our schedules.
``view``      pictures of planned schedules and of measured runs.
``patches``   the short list of upstream symbols that are replaced, one file per upstream module.
"""

__version__ = "0.2.0"
