"""Readers of what others keep a training's flags in, for commands that predict: what comes in is theirs, what goes out is ours.

``recipes`` is the door for files: Megatron-LM's tests, a model's config.json of Hugging Face (``huggingface``), an experiment of
AMD's Primus (``primus``); ``shell`` reads scripts, and ``bridge`` has Megatron-Bridge's recipes by name. ``upstream`` knows the
flags of Megatron-LM's releases, and what those mean that we have not. ``names.json`` has others' names of settings.
"""
