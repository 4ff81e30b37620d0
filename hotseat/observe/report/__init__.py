"""`report.html`: one run, or several side by side, in one file that needs no server."""

from hotseat.observe.report.page import write_report

__all__ = ["write_report"]
