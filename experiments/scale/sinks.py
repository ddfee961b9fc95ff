"""A second place for a run's numbers: Weights & Biases, Trackio or MLflow, whichever is installed.

Where they go, and whose they are, is for each package's own settings to say: WANDB_MODE, WANDB_PROJECT, TRACKIO_DIR,
TRACKIO_SPACE_ID, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME.

What is sent twice, by a run that was killed and does again the steps since its checkpoint, has the same step and value.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from experiments.errors import Mistake

PATIENCE = 30.0  # seconds that a run waits at its end for what is not sent yet


class Run(NamedTuple):
    """What is sent: a run goes on in the same place where its ``id``, which is ours, is the same."""

    id: str
    dir: Path
    config: dict

    @property
    def name(self) -> str:
        return self.dir.resolve().name


class Wandb:
    """Its own count of steps takes no number again, so that "step" is a number of ours."""

    def __init__(self, run: Run):
        import wandb  # pyrefly: ignore[missing-import]

        wandb.setup(wandb.Settings(silent=True))  # else it asks who one is, in the middle of a run
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
    """It knows a run by its name, so that the id is a part of it. The outcome is a last line."""

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
    """It names runs itself, so that the id is a tag, by which a run is found again."""

    def __init__(self, run: Run):
        import mlflow  # pyrefly: ignore[missing-import]

        self._client, self._entities = mlflow.MlflowClient(), mlflow.entities
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "nmjax")
        found = self._client.get_experiment_by_name(name)
        home = self._client.create_experiment(name) if found is None else found.experiment_id
        runs = self._client.search_runs([home], f"tags.nmjax = '{run.id}'")
        made = runs[0] if runs else self._client.create_run(home, tags={"nmjax": run.id}, run_name=run.name)
        self._id, self.place = made.info.run_id, f"run {made.info.run_id} of {name}, in {self._client.tracking_uri}"
        self._client.update_run(self._id, "RUNNING")
        for field, value in run.config.items():
            self._client.log_param(self._id, field, value)

    def write(self, step: int, values: dict[str, float]) -> None:
        now = round(time.time() * 1000)
        sent = [self._entities.Metric(name, value, now, step) for name, value in values.items()]
        for i in range(0, len(sent), 1000):  # as many as it takes at once
            self._client.log_batch(self._id, sent[i : i + 1000])

    def close(self, outcome: str, summary: dict[str, str]) -> None:
        for name, text in {"outcome": outcome, **summary}.items():
            self._client.set_tag(self._id, name, text)
        status = {"finished": "FINISHED", "interrupted": "KILLED"}.get(outcome, "FAILED")
        self._client.set_terminated(self._id, status)


SINKS = {"wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}


def check(name: str) -> None:
    """Refuse, before anything is done, a sink whose package is missing; a folder of its name is none."""
    if getattr(find_spec(name), "origin", None) is None:
        raise Mistake(f"--sink={name}: the package {name} is missing: pip install {name}.")


class Sender:
    """Sends from a thread of its own, for which no step waits. A sink that fails is told of once, and left alone."""

    def __init__(self, name: str, run: Run, tell: Callable[[str], None]):
        self._name, self._tell, self._waiting, self._alone = name, tell, queue.SimpleQueue(), False
        self._thread = threading.Thread(target=self._send, args=(run,), name=name, daemon=True)
        self._thread.start()

    def write(self, step: int, values: dict) -> None:
        if not self._alone:
            self._waiting.put(("write", step, values))

    def close(self, outcome: str, summary: dict[str, str]) -> None:
        self._waiting.put(("close", outcome, summary))
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self._lost(f"not done after {PATIENCE:.0f} s")

    def _send(self, run: Run) -> None:
        try:
            sink, what = SINKS[self._name](run), ""
            self._tell(f"{self._name}: {sink.place}")
            while what != "close":
                what, *values = self._waiting.get()
                getattr(sink, what)(*values)
        except (Exception, SystemExit) as error:  # whatever goes wrong there, the run goes on
            self._lost(" ".join(f"{type(error).__name__}: {error}".split())[:300])

    def _lost(self, why: str) -> None:
        if not self._alone:
            self._alone = True
            self._tell(f"{self._name}: {why.rstrip('.')}. It is left alone; metrics.jsonl has everything.")
