"""Hypothesis strategies for the events and records of each machine, for your own property tests."""

__all__: list[str] = []
