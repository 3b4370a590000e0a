"""Activations in host memory: what copies them (streams), what keeps them (host memory), and which are away (activations)."""
