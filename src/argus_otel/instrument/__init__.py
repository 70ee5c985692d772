"""Hooks, by layer: python, framework, gpu. The only place that imports torch."""
