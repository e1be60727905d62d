"""Evaluation you can trust: every number with its protocol, every sample counted, the backbone verified frozen."""
