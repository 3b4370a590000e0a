"""Watch over each rank of a training: times and bytes of its passes, where it is, and the end of all ranks when one is lost.

In come the passes of ``runtime`` (``recorder.py``) and positions (``progress.py``); out go reports of all ranks (``report.py``),
costs measured from them (``cost_profile.py``), one verdict on the rank that is to blame (``watchdog.py``), and
ranks and links that have become slow (``slow.py``).
"""
