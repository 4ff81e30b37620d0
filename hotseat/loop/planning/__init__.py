"""Turns a config into a plan and token budgets."""
