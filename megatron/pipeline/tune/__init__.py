"""Search for the fastest training of a GPT on a cluster.

In the order of what builds on what: ``candidate``, ``costs`` (what its passes cost), ``iteration`` (its seconds), ``layouts``
(what could be tried), ``search``, ``relax`` and ``write``. ``trial`` runs short trainings, and ``processes`` starts the ranks of
``mpipe check``.
"""
