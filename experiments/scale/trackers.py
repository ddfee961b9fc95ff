"""Trackers: Weights & Biases, Trackio or MLflow, as a second place for a run's numbers. The flag --tracker chooses one.

Each package's own settings say where the numbers go, and to whom they belong: WANDB_MODE, WANDB_PROJECT, TRACKIO_DIR,
TRACKIO_SPACE_ID, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME.

A run that was killed repeats the steps since its checkpoint. It then sends the same steps with the same values again.
"""

import os
import queue
import re
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from experiments.errors import Mistake

PATIENCE = 30.0  # seconds that a run waits at its end for what is not sent yet


class Run(NamedTuple):
    """A run as a tracker sees it. A run that continues has the same `id`, and so continues there too."""

    id: str  # ours: eight hexadecimal digits
    dir: Path
    config: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        return self.dir.resolve().name


class Tracker(Protocol):
    """A service that receives the numbers of a run. It is made with a `Run`."""

    place: str
    """The address at which a person finds the run."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Send the numbers of a step."""
        ...

    def close(self, outcome: str, summary: dict[str, str]) -> None:
        """Send the outcome and the summary of the run, and end."""
        ...


class Wandb:
    """Weights & Biases. Its own step count cannot go back, so "step" is sent as a number like the others."""

    def __init__(self, run: Run):
        import wandb  # pyrefly: ignore[missing-import]

        wandb.setup(wandb.Settings(silent=True))  # otherwise it asks for a login in the middle of a run
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "nmjax"), id=run.id, name=run.name, dir=run.dir, config=run.config,
            resume="allow", reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")
        self.place = self._run.settings.sync_dir if self._run.offline else self._run.url

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self, outcome: str, summary: dict[str, str]) -> None:
        self._run.summary.update({"outcome": outcome, **summary})
        self._run.finish(exit_code=int(outcome != "finished"))


class Trackio:
    """Trackio. It knows a run by its name, so the id is a part of the name. The outcome is a last line."""

    def __init__(self, run: Run):
        import trackio  # pyrefly: ignore[missing-import]

        name = f"{run.name}-{run.id}"
        self._run = trackio.init("nmjax", name, config=run.config, resume="allow", embed=False)
        self._step, self.place = 0, f"{name}, of the project nmjax"

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step)
        self._step = max(self._step, step)

    def close(self, outcome: str, summary: dict[str, str]) -> None:
        self._run.log({"outcome": outcome, **summary}, self._step)
        self._run.finish()


class Mlflow:
    """MLflow. It names runs itself, so the id is a tag, by which a run is found again."""

    MOST = 1000  # numbers that it takes at once

    def __init__(self, run: Run):
        import mlflow  # pyrefly: ignore[missing-import]

        self._client, self._entities = mlflow.MlflowClient(), mlflow.entities
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "nmjax")
        experiment = self._client.get_experiment_by_name(name)
        home = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        runs = self._client.search_runs([home], f"tags.nmjax = '{run.id}'")
        if runs:
            self._id = runs[0].info.run_id
        else:
            new = self._client.create_run(home, tags={"nmjax": run.id}, run_name=run.name)
            self._id = new.info.run_id
        self.place = f"run {self._id} of {name}, in {self._client.tracking_uri}"
        self._client.update_run(self._id, "RUNNING")
        known = runs[0].data.params if runs else {}  # MLflow refuses another value, such as that of config.mesh
        for field, value in run.config.items():
            if field not in known:
                self._client.log_param(self._id, field, value)

    def write(self, step: int, values: dict[str, float]) -> None:
        now = round(time.time() * 1000)
        metrics = [self._entities.Metric(name, value, now, step) for name, value in values.items()]
        for i in range(0, len(metrics), self.MOST):
            self._client.log_batch(self._id, metrics[i : i + self.MOST])

    def close(self, outcome: str, summary: dict[str, str]) -> None:
        status = {"finished": "FINISHED", "interrupted": "KILLED"}.get(outcome, "FAILED")
        try:
            for name, text in {"outcome": outcome, **summary}.items():
                self._client.set_tag(self._id, re.sub(r"[^/\w.\- :]", "", name), text)  # it refuses other characters
        finally:
            self._client.set_terminated(self._id, status)


TRACKERS: dict[str, Callable[[Run], Tracker]] = {"wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}


def check(name: str) -> None:
    """Refuse, before anything is done, a tracker whose package is missing. A folder of that name is no package."""
    if getattr(find_spec(name), "origin", None) is None:
        raise Mistake(f"--tracker={name}: the package {name} is missing: pip install {name}.")


class Sender:
    """Sends the numbers of a run from a thread of its own, so that no step waits.

    A tracker that fails is reported once, and gets nothing more.

    Args:
      name: One of `TRACKERS`.
      run: The run.
      tell: Shows a line to the person who watches the run.
    """

    def __init__(self, name: str, run: Run, tell: Callable[[str], None]):
        self._name, self._tell = name, tell
        self._waiting: queue.SimpleQueue = queue.SimpleQueue()
        self._given_up = False
        self._thread = threading.Thread(target=self._send, args=(run,), name=name, daemon=True)
        self._thread.start()

    def write(self, step: int, values: dict[str, float]) -> None:
        """Send the numbers of a step, later."""
        if not self._given_up:
            self._waiting.put(("write", step, values))

    def close(self, outcome: str, summary: dict[str, str]) -> None:
        """Send the outcome, and wait at most `PATIENCE` seconds until all is sent."""
        self._waiting.put(("close", outcome, summary))
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self._give_up(f"not done after {PATIENCE:.0f} s")

    def _send(self, run: Run) -> None:
        try:
            tracker, message = TRACKERS[self._name](run), ""
            self._tell(f"{self._name}: {tracker.place}")
            while message != "close":
                message, *values = self._waiting.get()
                getattr(tracker, message)(*values)
        except (Exception, SystemExit) as error:  # whatever fails there, the run goes on
            self._give_up(" ".join(f"{type(error).__name__}: {error}".split())[:300])

    def _give_up(self, reason: str) -> None:
        if not self._given_up:
            self._given_up = True
            self._tell(f"{self._name}: {reason.rstrip('.')}. Nothing more is sent to it; metrics.jsonl has everything.")
