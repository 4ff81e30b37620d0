"""Hotseat: RL post-training in which models, engines and simulators take turns on the same devices."""

__version__ = "0.1.0"
