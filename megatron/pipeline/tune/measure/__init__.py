"""Work of ``mpipe tune --measure``: time single layers and links on the present machine, and make a ``Device`` of that.

``sizes`` says which layers, without torch. ``processes`` starts the ranks, on each of which ``rank`` goes through ``layers``,
``links`` and ``machine``; what comes back are ``Measurements``, and ``outcome`` makes the device of it.
"""
