"""Vocabulary parallelism: the embedding and the output layer cut over all tensor- and pipeline-parallel ranks.

``layout`` says which rank has which rows, ``input`` looks tokens up (IF, IB), ``output`` makes logits and their gradients
(S, T), ``loss`` joins what the shards know of a token, and ``shard`` holds a rank's weights.
"""
