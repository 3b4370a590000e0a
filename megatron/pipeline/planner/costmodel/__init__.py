"""Seconds and bytes of a GPT's passes, predicted from the model's description and a GPU's file.

What comes in: ``shape.description.ModelDescription``, a placement, a ``device.Device``. What goes out: ``Costs`` of every stage,
and the memory of every rank.

Read ``estimate.py`` for seconds and ``memory.py`` for bytes first.

``activations``, ``parameters``, ``traffic``  bytes that are kept, trained, and moved by kernels
``device``, ``links``                         speeds of a GPU, and of what joins ranks
``replicas``                                  what data-parallel replicas add
``origin``                                    measured costs, and the GPU that follows from them
``ranges``                                    how far predictions are off
"""
