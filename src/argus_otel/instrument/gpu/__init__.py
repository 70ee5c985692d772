"""The GPU layer. Empty for now: kernels, phase events and devices come with their own probes."""
