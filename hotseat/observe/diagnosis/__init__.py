"""`hotseat diagnose`: why a run collapsed, by rules over its records, each with its evidence and a cure."""

from hotseat.observe.diagnosis.rules import RULES, Cause, diagnose, render_table
from hotseat.observe.diagnosis.run_ending import Ending
from hotseat.observe.diagnosis.signs import OptionAdvice, OptionChange
from hotseat.observe.diagnosis.unexplained import Unexplained, unexplained

__all__ = [
    "RULES",
    "Cause",
    "Ending",
    "OptionAdvice",
    "OptionChange",
    "Unexplained",
    "diagnose",
    "render_table",
    "unexplained",
]
