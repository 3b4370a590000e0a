"""Table of what does not go together, why, and what to do instead: flags, launch, calls and plans ask it.

What comes in: ``table.Facts``, settings by name. What goes out: sentences, or a ``ValueError`` that has them (``Facts.refuse``).
``rows.py`` has the rows by topic, ``needs.py`` those of flags that need others.
"""
