"""Reinforcement learning: the loop, and a phase object for each step of it."""
