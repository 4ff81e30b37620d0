"""Turns a config into a plan, token budgets, and advice where the plan does not fit. Needs no device and no torch."""
