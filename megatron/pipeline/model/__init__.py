"""The model of this rank, cut by a placement, with linears whose backward splits.

What comes in: flags or a loop's model, and a placement. What goes out: a chunk for each stage of this rank, wrapped in DDP, whose
weights do not depend on where they lie.

Read ``build.py`` first.

``layout``, ``stage``, ``chunk_marks``  layers of every stage, and what a chunk is
``adapter``, ``layer_spec``             kinds of models, and modules of a layer
``split_linear``, ``te_linear``         weights whose gradient W computes
``seeding``, ``seeded_layers``          random numbers that no placement changes
``boundary``                            weights that the first and the last stage share
``slices``, ``context_parallel``        parts of sequences
``vocabulary``                          shards of the embedding and of the output layer
``description``                         what predictions read, made of flags
"""
