"""The version, importable without importing anything else."""

VERSION = "0.1.0"
