"""Activations in host memory: what copies them (lanes), what keeps them (host memory), and which are away (activations)."""
