"""A rehearsal: all ranks of a training on one machine, which run their passes one at a time.

In come a ``Pipeline`` that takes turns (``device_lock.py``) and the flags of ``--rehearse``; out come ``rehearsal.json``,
``costs.json`` and a picture. Begin with ``measure.py``.
"""
