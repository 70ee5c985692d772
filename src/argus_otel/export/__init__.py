"""Encoded requests to an OTLP/HTTP endpoint: bounded, patient, and never in the trainer's way."""

from argus_otel.export.sender import Sender
from argus_otel.export.stats import SenderStats
from argus_otel.export.targets import Signal, Target, targets_from_environment

__all__ = ["Sender", "SenderStats", "Signal", "Target", "targets_from_environment"]
