"""The metrics of a run for TensorBoard, on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ocnopt.lab.runs import Record

# what is no curve
_NOT_DRAWN = ("kind", "step", "epoch", "layers", "diverged", "name")


class TensorBoard:
    """Writes records of a run as scalars, under the kind of the record; steps are the x axis."""

    def __init__(self, folder: Path, step: int) -> None:
        """``step``: where the run is; what was written beyond it, by a run that was killed, is not shown."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1)
        self._step = step

    def write(self, record: Record) -> None:
        self._step = record.get("step", self._step)
        self._draw(record["kind"], record)
        for layer in record.get("layers", ()):
            self._draw(f"layers/{layer['name']}", layer)

    def _draw(self, prefix: str, values: Record) -> None:
        for key, value in values.items():
            if key not in _NOT_DRAWN and value is not None:
                self._writer.add_scalar(f"{prefix}/{key}", value, self._step)

    def close(self) -> None:
        self._writer.close()
