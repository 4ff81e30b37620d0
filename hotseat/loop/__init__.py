"""Runs: roles, engines, backends and rewards put together, and the loops that drive them."""
