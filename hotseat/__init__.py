"""Hotseat: RL post-training in which models and rollout engines take turns on the same devices.

    import hotseat

    run = hotseat.run("rl.yaml", "train.num_episodes=2")
    run.path, run.evaluation, run.metrics()

`import hotseat` loads nothing heavy: torch, transformers and Ray are imported by the first run.
"""

from hotseat.api import Run, run

__all__ = ["Run", "__version__", "run"]

__version__ = "0.1.0"
