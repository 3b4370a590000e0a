"""The planner's one tolerance."""

# Relative: sums of floats stray in their last bits, as of fractions such as 1/3, and rounding errors are below this. A limit this
# much larger is not broken, and keeps every bound valid.
SLACK = 1e-9
