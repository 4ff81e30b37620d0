"""Output of a run: files on disk, a live view, TensorBoard, Weights & Biases."""

from hotseat.observe.journal import METRICS, PREDICTION, RECORDS, SAMPLES, Journal, NullJournal
from hotseat.observe.live import LiveView
from hotseat.observe.metric_files import JsonLines, TensorBoard, drop_cut_line, read_lines
from hotseat.observe.monitor import Monitor
from hotseat.observe.run_progress import QuietLimits, RunProgress
from hotseat.observe.timeline import Timeline, read_timeline

__all__ = [
    "METRICS", "PREDICTION", "RECORDS", "SAMPLES", "Journal", "JsonLines", "LiveView", "Monitor", "NullJournal",
    "QuietLimits", "RunProgress", "TensorBoard", "Timeline", "drop_cut_line", "read_lines", "read_timeline",
]  # fmt: skip
