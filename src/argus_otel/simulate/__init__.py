"""A cluster with faults: synchronous training as a discrete-event model, and its tables."""
