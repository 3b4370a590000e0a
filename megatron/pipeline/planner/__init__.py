"""Plans pipeline schedules and predicts their time and memory; never imports torch.

What comes in: a request (schedule, sizes, costs, limits). What goes out: a verified plan, with a program for every rank.

The rooms, from the top: each imports only those below it.

``serve``         the page to play with schedules
``planning``      from a request to a verified plan
``costmodel``     seconds and bytes of a GPT's passes
``view``          pictures of planned schedules and of measured runs
``shape``         the sizes of a model
``schedule``      what runs when: passes, placements, families, simulation, proof, lowering
``combinations``  what does not go with what
"""
