"""`hotseat diagnose`: why a run collapsed, by rules over its records, each with its evidence and a cure."""

from hotseat.observe.diagnosis.ending import Ending
from hotseat.observe.diagnosis.rules import RULES, Cause, diagnose, render_table

__all__ = ["RULES", "Cause", "Ending", "diagnose", "render_table"]
