"""See and diagnose distributed PyTorch training, as OpenTelemetry."""
