"""Flags of a training: Megatron-LM's, with its names, and ours.

What comes in: a command line, a configuration file, or what others keep flags in. What goes out: ``settings.Settings``, frozen,
checked before any process group exists, and megatron-core's configuration objects.

Read ``settings.py`` first, which has our flags by topic, then ``arguments.py``.

``flags``, ``flag_types``  every flag with its help; from words to numbers
``arguments``              the command line read, and what is said of flags that are gone
``validation*``            do they fit together?
``facts``, ``support``     what the table of combinations is asked, and what a run warns of
``config``                 megatron-core's configuration objects
``shrink``                 the same training of a smaller model, for ``mpipe check``
``importers``              scripts, recipes and configurations of others
``packages``               what is said where one is not installed
"""
