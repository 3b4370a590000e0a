"""The sizes of a model: what its layers compute and keep, and how layers and vocabulary are shared out.

What comes in: ``description.ModelDescription``, made of flags by ``model/description.py``. What goes out: ``gpt.Shape``, read by
``costmodel``; layers of every stage (``stages.py``) and rows of every shard (``shards.py``), read by training, too.

A kind of layer is a ``mixer.Mixer`` in a file of its own: ``gated_delta``, ``latent``, ``mamba``; ``hybrid`` reads patterns of
them. ``experts``, ``windows``, ``precision`` and ``activation_policy`` are properties of a layer.
"""
