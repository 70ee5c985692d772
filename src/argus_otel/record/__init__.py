"""Buffers that the training thread appends to, and the plan of which steps get more."""
