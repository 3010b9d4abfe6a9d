"""Random operations against models."""
