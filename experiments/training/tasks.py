"""The task of a config: one of this repository's, or one that somebody else wrote."""

from collections.abc import Callable
from typing import Any

from experiments.errors import Mistake
from experiments.training import finetune, image, settings, text
from experiments.training.task import Task
from nmjax.core import names

TASKS: dict[str, Callable[..., Any]] = {"image": image.Task, "text": text.Task, "finetune": finetune.task}
METHODS = tuple(name for name, member in vars(Task).items() if callable(member) and not name.startswith("_"))


def task(config: Any, plan: bool = False) -> Task:
    """Return the task that ``config.experiment`` names, made from the config.

    Args:
      config: The settings of a run. Its experiment is "image", "text", "finetune", or ``module:name`` of a class with
        the members of `experiments.training.task.Task`, as in ``mylab.tasks:Segmentation``. The class is called with
        the config.
      plan: Whether the task is only planned. Then its data may be missing, if their sizes are known.

    Returns:
      The task.

    Raises:
      Mistake: The name is not known, cannot be imported, or is not that of a task.
    """
    name = config.experiment
    if not names.is_foreign(name):
        known = settings.one_of(name, TASKS, "config.experiment")
        made = TASKS[known](config)
        if made.missing is not None and not plan:
            raise made.missing
        return made
    with settings.as_mistake(f"config.experiment={name!r}"):
        make = names.load(name)
    if not isinstance(make, type):
        raise Mistake(f"config.experiment={name!r} is a {type(make).__name__}, not a class with the members of Task.")
    _check(name, make, METHODS)
    made = make(config)
    _check(name, made, (*METHODS, *Task.__annotations__))
    return made


def _check(name: str, owner: Any, members: tuple[str, ...]) -> None:
    missing = [member for member in members if not hasattr(owner, member)]
    if missing:
        raise Mistake(
            f"config.experiment={name!r} is not a task: it has no {', '.join(missing)}. "
            "experiments/training/task.py says what a task has."
        )
