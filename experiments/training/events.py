"""The numbers of a run as they come: lines of metrics.jsonl, and TensorBoard's events."""

import contextlib
import time
from pathlib import Path


class Lines:
    """A file of lines. Each line is on the disk whole as soon as it is written, or waits for the next one.

    Lines wait while the disk takes no more. `late` is their number, `reason` says why they wait.
    """

    def __init__(self, path: Path):
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._waiting: list[str] = []
        self.reason = ""

    @property
    def late(self) -> int:
        """The number of lines that wait."""
        return len(self._waiting)

    def write(self, line: str) -> bool:
        """Write a line after those that wait, and return whether all are on the disk."""
        self._waiting.append(line)
        data = "".join(self._waiting).encode()
        try:
            done = 0
            while done < len(data):
                done += self._file.write(data[done:])
        except OSError as error:
            self.reason = error.strerror or str(error)
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)  # a part of a line would spoil the lines after it
            return False
        self._size += done
        self._waiting = []
        return True

    def close(self) -> None:
        """Write what waits and close the file.

        Raises:
          OSError: If lines could not be written; it says how many.
        """
        waiting = self.late
        lost = waiting > 0 and not self.write("")
        self._file.close()
        if lost:
            raise OSError(f"{waiting} lines of {self._file.name} could not be written: {self.reason}")


class Events:
    """TensorBoard's file of numbers. It is written without a thread, because a thread would hang on a full disk.

    Args:
      directory: The folder that TensorBoard reads.
      step: The step that the run begins or continues at.
    """

    def __init__(self, directory: Path, step: int):
        from tensorboardX.event_file_writer import EventsWriter  # imported when a run begins: a plan does without it
        from tensorboardX.proto import event_pb2
        from tensorboardX.summary import scalar

        directory.mkdir(parents=True, exist_ok=True)
        self._scalar, self._event = scalar, event_pb2.Event
        self._writer = EventsWriter(str(directory / "events"))
        if step:  # tells TensorBoard to drop what an earlier file holds of later steps
            self._put(step + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Write the numbers of a step under their names."""
        for name, value in numbers.items():
            self._put(step, summary=self._scalar(name, value))
        with contextlib.suppress(OSError):
            self._writer.flush()

    def _put(self, step: int, **event) -> None:
        with contextlib.suppress(OSError):  # metrics.jsonl holds the same numbers, and says what is missing
            self._writer.write_event(self._event(step=step, wall_time=time.time(), **event))

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._writer.close()
