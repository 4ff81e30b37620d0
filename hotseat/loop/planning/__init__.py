"""From a config to a plan and to token budgets."""
