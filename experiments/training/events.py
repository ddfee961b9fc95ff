"""The numbers of a run as they come: lines of metrics.jsonl, and TensorBoard's events."""

import contextlib
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments.files import write_whole


class Pieces:
    """A file that grows by pieces. Each piece is either written whole at once, or waits for the next piece.

    Pieces wait while the disk takes no more. `late` is their number, `reason` says why they wait.
    """

    def __init__(self, path: Path):
        self._path, self._file = path, path.open("ab", buffering=0)
        self._opened = os.fstat(self._file.fileno())
        self._size = path.stat().st_size
        self._waiting: list[bytes] = []
        self.reason = ""

    @property
    def late(self) -> int:
        """The number of pieces that wait."""
        return len(self._waiting)

    def write(self, piece: bytes) -> bool:
        """Write a piece after those that wait, and return whether all are in the file."""
        self._waiting.append(piece)
        data = b"".join(self._waiting)
        try:
            self._refuse_another()
            write_whole(self._file, data, self._size)  # a part of a piece would spoil the pieces after it
        except OSError as error:
            self.reason = error.strerror or str(error)
            return False
        self._size += len(data)
        self._waiting = []
        return True

    def _refuse_another(self) -> None:
        """Refuse to write where nobody will read it: the file was removed, or another one is in its place."""
        try:
            same = os.path.samestat(self._opened, self._path.stat())
        except FileNotFoundError:
            same = False
        if not same:
            raise OSError("the file was removed or replaced while the run was writing to it")

    def close(self) -> int:
        """Write what waits, close the file, and return how many pieces were lost."""
        waiting = self.late
        lost = waiting if waiting and not self.write(b"") else 0
        with contextlib.suppress(OSError):
            self._file.close()
        return lost


class Events:
    """TensorBoard's file of events. It is written without a thread, because a thread would hang on a full disk.

    Args:
      directory: The folder that TensorBoard reads.
      step: The step that the run begins or continues at.
    """

    def __init__(self, directory: Path, step: int):
        from tensorboardX import record_writer, summary  # imported when a run begins, because a plan does not need it
        from tensorboardX.proto import event_pb2

        directory.mkdir(parents=True, exist_ok=True)
        self._make, self._event, self._checksum = summary, event_pb2.Event, record_writer.masked_crc32c
        self._file = Pieces(directory / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}")
        self._put(0, file_version="brain.Event:2")
        # tells TensorBoard to drop what an earlier file holds of later steps
        self._put(step + 1 if step else 0, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Write the numbers of a step under their names."""
        for name, value in numbers.items():
            self._put(step, summary=self._make.scalar(name, value))

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text in Markdown."""
        self._put(step, summary=self._make.text(name, text))

    def image(self, step: int, name: str, image: np.ndarray) -> None:
        """Write an image uint8[H, W, C]."""
        self._put(step, summary=self._make.image(name, image, dataformats="HWC"))

    def hparams(self, step: int, fields: dict[str, Any], scores: list[str]) -> None:
        """Write the settings of a run. TensorBoard's tab HPARAMS shows them with the final scores, a row for each run.

        Args:
          step: The last step.
          fields: The settings by their names.
          scores: The names of the curves whose last values are the final scores.
        """
        plain = {
            name: value if isinstance(value, str | bool | int | float) else str(value) for name, value in fields.items()
        }
        for summary in self._make.hparams(plain, dict.fromkeys(scores)):
            self._put(step, summary=summary)

    def _put(self, step: int, **event) -> None:
        """Write an event: its length and its bytes, each with a checksum."""
        data = self._event(step=step, wall_time=time.time(), **event).SerializeToString()
        length = struct.pack("<Q", len(data))
        sums = [struct.pack("<I", self._checksum(part)) for part in (length, data)]
        self._file.write(length + sums[0] + data + sums[1])  # metrics.jsonl has the numbers, and says what is missing

    def close(self) -> None:
        """Close the file."""
        self._file.close()
