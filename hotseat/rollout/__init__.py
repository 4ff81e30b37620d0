"""Rollout engines: token ids in, sampled token ids and their log-probs out, with weights that change while they run."""

from hotseat.rollout.engine import PARTS, Engine, Health
from hotseat.rollout.transformers_engine import SlotOptions, TransformersEngine

__all__ = ["PARTS", "Engine", "Health", "SlotOptions", "TransformersEngine"]
