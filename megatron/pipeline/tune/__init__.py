"""Search for the fastest training of a GPT on a cluster.

In the order of what builds on what: ``candidate``, ``iteration`` (the seconds of one), ``layouts`` (what could be tried),
``search``, ``relax`` and ``write``. ``measure`` and ``trial`` run something: single layers and links, and short trainings.
"""
