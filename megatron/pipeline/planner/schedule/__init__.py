"""Schedules as data, and functions of them: what runs when.

What comes in: a ``core.problem.Problem`` (placement, microbatches, costs, limits). What goes out: a ``core.schedule.Schedule``,
proved, timed, and lowered to a program for every rank.

The packages, from the bottom: each imports only those below it.

``core``        passes and their kinds, placements, costs, schedules
``time``        simulation
``lower``       programs, with messages and waits
``rules``       what every schedule and program must obey
``transforms``  recomputation, vocabulary, offload, overlapped passes
``optimum``     lower bounds
``search``      orders that are found
``families``    one function for each family; read ``zb_h1.py`` first
``certify``     do messages hang?
"""
