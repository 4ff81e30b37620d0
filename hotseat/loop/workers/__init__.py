"""Classes that run in worker processes: models, engines, rollout hosts."""
