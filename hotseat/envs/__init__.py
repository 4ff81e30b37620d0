"""Simulators: batches of worlds in which a policy acts.

A family is one file (`families/`, or a user's). `processes.py` runs it in child processes.
"""
