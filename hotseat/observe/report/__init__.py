"""`report.html`: one run, or several side by side, in one file that needs no server."""

from hotseat.observe.report.page import EVALUATED, write_report

__all__ = ["EVALUATED", "write_report"]
