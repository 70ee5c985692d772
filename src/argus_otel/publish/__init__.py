"""A verdict put back where people look: into the trace of the step it speaks of."""
