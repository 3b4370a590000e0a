"""The quick start, ``pretrain_gpt.py``: a small loop of its own on megatron-core, which needs no ``megatron.training``.

It gets no new features; ``mpipe check``, rehearsals and tests run it. What comes in: the command line. What goes out: a trained
model in ``--save``, in Megatron-LM's layout.

Read ``program.py`` first: it checks all, builds, loads and trains.

``loop``, ``iterations``    iterations, evaluations, saves and the ways to stop; one iteration with its step
``state``                   the model with its optimizer
``data``, ``data_files``    samples, and files of them
``checkpoint``, ``checkpoint_files``, ``optimizer_state``  what is saved, and what of it fits the flags
``run_log``                 lines, metrics and TensorBoard
``gradients``, ``gradient_files``  every weight's gradient on disk, which ``mpipe check`` compares
"""
