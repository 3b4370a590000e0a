"""A training under a schedule, as every program has it: ``install()``, ``mpipe launch`` and the trainer.

What comes in: flags, as ``flags.settings.Settings``, or a loop's calls. What goes out: a pipeline that runs iterations, the lines
of a start, metrics, traces, measured costs, and failures in one line.

Read ``planning.py`` first, from flags to a pipeline, or ``own_loop.py``, from a loop's calls to the same.

``own_loop``             what a loop on megatron-core asks for, from its model's configuration to the reports of an iteration
``last_rank``            the way home of these reports, where a V has the last stage elsewhere
``planning``, ``memory`` the request of a training's flags, and what limits it
``call_watch``           the watchdog around a training, or between a loop's calls
``startup_lines``        what a run says at its start
``reports``, ``metrics``, ``trace``, ``rehearsal``  uses of what iterations measure
``checkpoints``, ``checkpoint_failures``, ``save_lock``, ``atomic``  directories of checkpoints, whichever program writes them
``tokenizer``, ``groups``  the vocabulary, and process groups
"""
