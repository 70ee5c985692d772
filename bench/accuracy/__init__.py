"""The score of the detectors on simulated runs."""
