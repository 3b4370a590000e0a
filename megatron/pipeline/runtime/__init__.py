"""One rank runs its program, of any family.

What comes in: a request, whose plans ``planner`` makes, and a call of megatron-core's ``forward_backward_func``. What goes out:
losses and gradients, and records of passes for ``monitor``.

Read ``pipeline.py`` first, then an iteration: ``iteration``, ``executor``, ``stage_passes``, ``model_stages``, ``p2p``.

``call``                            one call, and what follows from its keywords
``wiring``                          tensors that a pass takes and makes
``gradient_sync``                   when reductions may start
``vocabulary``, ``vocabulary_stages``, ``layer_plans``, ``offload``  passes of spread vocabularies, overlapped experts, copies
``optimizer``, ``rewind``           steps before the gradient norm is known, and forwards run anew
``agreement``                       all ranks run one plan
``background``                      planning beside training; ``replan``, ``every_batch`` and ``packing`` ask it or come before it
``profiling``, ``ping``             measured costs of passes and messages
``watch``                           slow ranks and links, named and planned for
"""
