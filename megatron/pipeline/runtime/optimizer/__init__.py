"""Optimizer post-validation: steps taken before it is known whether they stand, so that iterations interlock."""
