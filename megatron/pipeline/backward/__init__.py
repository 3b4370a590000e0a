"""Backwards in two parts: B computes input gradients, and W weight gradients, later and in any order.

What comes in: a layer's backward. What goes out: its input gradient now, and a task for W (``weight_tasks.py``: read it first);
``linear`` and ``grouped_experts`` are the layers that leave tasks.
"""
