"""Pretraining: its steps, what is measured before, during and after them, and the health check."""
