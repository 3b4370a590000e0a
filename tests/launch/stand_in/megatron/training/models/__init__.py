"""Models that are built from a configuration, as in 0.18 and later."""
