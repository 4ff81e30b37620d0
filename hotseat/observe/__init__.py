"""What people see of a run: metrics on disk, a live view, TensorBoard."""

from hotseat.observe.live import LiveView
from hotseat.observe.metrics import MetricsFile, TensorBoard, read_metrics

__all__ = ["LiveView", "MetricsFile", "TensorBoard", "read_metrics"]
