"""Which rank, which cause, since when, at what cost: rules over windows of a run's tables.

``engine.diagnose(tables)`` is the entrance; ``api`` is all that a detector may import.
"""
