"""Simulators: batches of worlds in which a policy acts.

A family is one file (`families/`, or a user's). `ProcessEnv` runs it in child processes; `env.py` has the contract.
"""
