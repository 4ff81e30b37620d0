"""Leases on devices, and how much of their memory is in use."""
