"""Pipeline schedules for today's megatron-core, without a fork.

The rooms, from the top: each imports only those below it (docs/architecture.md).

``cli``        the command ``mpipe``
``serve``      the page to play with schedules
``launch``     Megatron-LM's own scripts, unchanged, under our schedules
``tune``       the search for the fastest training
``trainer``    data, checkpoints and the loop of ``pretrain_gpt.py``
``session``    what programs share: planning from flags, start-up lines, reports, names of checkpoints
``flags``      Megatron-LM's flags and ours
``optimizer``  optimizer steps before the gradient norm is known
``runtime``    how one rank runs its program
``health``     the watchdog, and the position of each rank
``record``     times and bytes of passes
``model``      the GPT cut by a placement, with linears whose backward splits
``patches``    the short list of upstream symbols that are replaced, one file per upstream module
``planning``   from a request to a verified plan
``costmodel``  seconds and bytes of a GPT's passes
``view``       pictures of planned schedules and of measured runs
``shape``      the sizes of a model
``schedule``   what runs when: passes, placements, families, simulation, proof, lowering; never imports torch
``backward``   backwards that leave weight gradients to W
``dist``       devices, process groups, collectives
"""

__version__ = "0.2.0"
