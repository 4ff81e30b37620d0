"""Families of simulators, one file each. Each has a function `make(tasks, max_steps, **kwargs)`; see `gym`."""

__all__ = ["babyai", "gym"]
