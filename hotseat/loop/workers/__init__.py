"""What runs in worker processes: models, engines, rollout hosts."""
