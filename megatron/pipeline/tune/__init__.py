"""What a GPT costs and holds on a cluster, and which training of it is fastest.

In the order of what builds on what: ``gpt`` (shape and operations), ``activations``, ``parameters`` and ``traffic`` (bytes),
``device`` and ``links`` (speed), ``estimate`` (costs of passes), ``memory`` (of every rank), ``iteration`` (seconds of one, of a
layout and a schedule), ``layouts`` (what could be tried), ``search``, ``rescue`` and ``write``. ``measure`` and ``trial`` run
something: single layers and links, and short trainings.
"""
