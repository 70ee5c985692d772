"""Names of everything that argus emits; made from registry.yaml, never typed twice."""
