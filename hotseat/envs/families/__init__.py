"""Families of simulators, one file each. Each has a function `make` or `make_worlds`; see `gym`, `mujoco_warp`."""

__all__ = ["babyai", "gym", "mujoco_warp"]
