"""The framework layer: steps, phases, collectives, and who this process is in its job."""
