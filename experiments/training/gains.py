"""The phases of a plan in which products run in a way that one program for all steps cannot use."""

from nmjax.nnx import Plan

FAST = ("packed", "compacted", "fp8")


def gains(plan: Plan, step: int) -> bool:
    """Return whether more products run in a fast way in the phase of a step than in one program for all steps.

    Args:
      plan: The plan.
      step: The step.
    """
    return bool(plan.phases) and any(plan.runs_at(step).get(how, 0) > plan.runs.get(how, 0) for how in FAST)


def changes(plan: Plan, steps: int) -> tuple[int, ...]:
    """Return the steps at which a run changes its program: to or from a phase that gains.

    Args:
      plan: The plan.
      steps: The number of steps of the run.
    """
    before, found = gains(plan, 0), []
    if before:
        found.append(0)
    for step in plan.phases:
        now = gains(plan, step)
        if step < steps and (now or before):
            found.append(step)
        before = now
    return tuple(found)
