"""The program of a run: what is compiled, as functions of the run's state.

The first state, the step, the scores and the measures. A *task* (`tasks.py`) brings the model and the data.
"""

import copy
import operator
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

import nmjax as nm
from experiments.errors import Mistake, mistaken
from experiments.scale import processes, shards
from experiments.training import hardest, settings
from experiments.training.pretrained import put
from experiments.training.state import RUNS, State, averaged, part, stack
from experiments.training.tasks import Task
from nmjax.programs.states import reads_gradient

FAST = ("packed", "compacted", "fp8")  # ways in which products may run

_sharding = operator.attrgetter("sharding")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class Program:
    """The functions of a run. They are compiled once, and serve other seeds and other data of the same shapes too.

    Args:
      config: The settings of the run, which are parsed here.
      task: The model and the data.

    Attributes:
      pretrained: Values of parameters by path, with which a run begins; {} if all are drawn.
      total: Number of steps of the run.
      patience: Number of steps without a better evaluation after which a run stops; 0 means never.
      evaluations: Number of steps from one evaluation to the next.
      measures: Number of steps from one measurement of sparsity to the next; 0 means never.
      rate: The learning rate as a function of the step.
      mesh, plan: The devices, arranged; and the plan of the model.
      explicit: True if the loss is computed on explicit axes of the mesh.
      untyped: The reason why it is not, where kernels need it; or "".
      flops: Average FLOPs of a micro-step, dense and effective.
      phases: The steps at which the training step becomes another program (`in_phase`).
      shapes: The state as `jax.ShapeDtypeStruct`s with shardings.
      count: Number of runs that the functions serve at once (`beside`).
      one: The program of a single run.
      hardened_graph: The graph of the hardened model, or None if the model cannot be hardened.
      hardening_refusal: The reason why it cannot, or "".
      compiled_init: `init` as a function of a seed and `pretrained`.
      train: `train(state, arrays) -> (state, figures)` takes a step. The state is donated.
      score: `score(state, batch)` returns sums over a batch of evaluation.
      hard_score: `hard_score(hard, batch)` returns the same for hardened weights.
      harden: `harden(state)` returns the hardened weights.
      measure: `measure(state, arrays)` returns what pruning does to weights and gradients, by layer.
      masks, flips: `masks(state)` returns the weights' masks, `flips(masks, masks)` the share that changed.
    """

    def __init__(self, config: ConfigDict, task: Task):
        self.config, self.task = config, task
        self.pretrained: dict[str, Any] = getattr(task, "pretrained", {})
        self._set_schedule()
        self._set_mesh()
        self._set_model()
        self._refuse_plan()
        self.flops = self.plan.over(self.total, data_gradients=False)
        if self.starts_late:  # the first sparse step is known only during the run: count the sparsest step
            free = [(layer.flops or 0, layer.shares[1]) for layer in self.plan.layers if layer.reads_data]
            dense, effective = self.plan.training
            self.flops = (dense - sum(cost for cost, _ in free), effective - sum(cost * share for cost, share in free))
        self.phases = () if self.starts_late else changes(self.plan, self.total)
        if all(layer.sparsity == nm.Sparsity() for layer in self.plan.layers):
            self.measures = 0
        places = self._set_state()
        self.one, self.count, self._programs = self, 1, {1: self}
        self._set_functions(places, lambda function, *axes, **_: function)
        self._set_hardened()

    # ---- what a config says ----

    def _set_schedule(self) -> None:
        """Parse the length of the run, its recipe and its optimizer."""
        config = self.config
        self.total = settings.steps(config, self.task.examples)
        self.evaluations = settings.duration(config.evaluate, self.total, "config.evaluate") or self.total
        self.patience = settings.duration(config.stop, self.total, "config.stop")
        self.measures = settings.duration(config.measure, self.total, "config.measure")
        self.recipe = settings.recipe(config, self.total)
        self.rate = settings.learning_rate(config, self.total)
        optimizer, _ = settings.call(settings.in_steps(config.optimizer, self.total), "config.optimizer")
        self.starts_late = optimizer == "step_adam"  # which decides during the run when the weights become sparse
        self.tx = settings.optimizer(config, self.rate, self.total)

    def _set_mesh(self) -> None:
        """Arrange the devices, and refuse a batch that they cannot share."""
        config = self.config
        self.mesh = shards.mesh(config.mesh)
        self.split = shards.batch(self.mesh)
        self.micro_batch = config.batch // config.accumulate
        parts = shards.parts(self.mesh)
        if self.micro_batch % parts:
            raise Mistake(
                f"config.batch={config.batch} and config.accumulate={config.accumulate}: {parts} devices cannot share "
                f"a micro-batch of {self.micro_batch}. Write a config.batch that {parts * config.accumulate} divides."
            )

    def _set_model(self) -> None:
        """Describe the sparse model by its shapes, and plan it."""
        with mistaken("the model"):
            nnx.eval_shape(lambda: self.task.make(nnx.Rngs(0)))
        with mistaken("config.rules and config.sparsity"):
            self.model = nnx.eval_shape(lambda: nm.nnx.sparsify(self.task.make(nnx.Rngs(0)), self.recipe))
            _, params, rest = nnx.split(self.model, nnx.Param, ...)
            self.graph = nnx.split(self.model)[0]
            forms = jax.eval_shape(self._packed, nnx.as_pure(params), nnx.as_pure(rest), 0)
            self._set_plan(forms)

    def _set_plan(self, forms: dict) -> None:
        """Plan the model, on explicit axes of the mesh where kernels need them and the model has a rule for them."""
        given, self.explicit, self.untyped = self.task.example(self.micro_batch), False, ""
        if shards.shows(self.mesh):
            place = NamedSharding(shards.explicit(self.mesh), self.split.spec)
            cut = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=place), given)
            try:
                with jax.sharding.use_abstract_mesh(place.mesh):
                    self.plan, self.explicit = nm.nnx.plan(self.model, *cut), True
                return
            except Exception as error:  # any operation may lack a rule for types that say how arrays lie
                self.untyped = f"the model does not run on a mesh of explicit axes: {_first_line(error)}"
        with nm.nnx.packed(self.model, forms):
            self.plan = nm.nnx.plan(self.model, *given)

    def _refuse_plan(self) -> None:
        """Refuse a recipe that layers of the model cannot carry out."""
        refused = self.plan.refused
        if refused:
            lines = [f"  {path or 'the model'}: {reason.rstrip('.')}." for path, reason in refused[:3]]
            lines += [f"  And {len(refused) - 3} more."] * (len(refused) > 3)
            raise Mistake("\n".join(["config.rules and config.sparsity cannot be carried out:", *lines]))

    def _set_state(self) -> State:
        """Describe the state by its shapes. Return the shardings of its arrays."""
        state = jax.eval_shape(self._init, jax.ShapeDtypeStruct((), jnp.uint32), self.pretrained)
        places = shards.of_state(state, self.model, self.mesh)
        self.compiled_init = jax.jit(self._init, out_shardings=places)
        self.frozen = [path for path, factor in settings.factors(self.config, state.params).items() if not factor]
        placed = lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
        self.shapes = jax.tree.map(placed, state, places)
        return places

    def _set_hardened(self) -> None:
        """Describe the hardened model, if there is one."""
        try:
            self.hardened_graph, self.hardening_refusal = self._harden_graph(), ""
        except ValueError as error:  # for example, weights that are drawn again at every step
            self.hardened_graph, self.hardening_refusal = None, str(error)

    def step_flops(self) -> list[float]:
        """Return the average FLOPs of a step, dense and effective."""
        return [flops * self.config.accumulate for flops in self.flops]

    # ---- what is compiled ----

    def _set_functions(self, places: State, over: Callable) -> None:
        """Make the functions of a state.

        Args:
          places: The shardings of the state.
          over: `over(f, *axes, out=0)` returns f for all runs at once, which lie along `axes` of its arguments.
        """
        whole = shards.whole(self.mesh)  # every process reads the results
        over_runs = lambda program: over(program.train_step, RUNS, None, out=(RUNS, 0))
        self._train_of = lambda program: jax.jit(over_runs(program), donate_argnums=0, out_shardings=(places, whole))
        self.train, self._by_phase = self._train_of(self), {None: self}
        self.score = jax.jit(over(self._score, RUNS, None), out_shardings=whole)
        self.hard_score = jax.jit(over(self._hard_score, 0, None), out_shardings=whole)
        self.harden = jax.jit(over(self._harden, RUNS))
        self.measure = jax.jit(over(self._measure, RUNS, None), out_shardings=whole)
        self.masks = jax.jit(over(self._masks, RUNS))
        self.flips = jax.jit(over(nm.metrics.flip_rates, 0, 0), out_shardings=whole)

    def in_phase(self, step: int) -> "Program":
        """Return the program for a step. It differs at most in `train`, which computes the same.

        It is valid until the next of `phases`. It is a program of its own if products run packed or compacted only in
        the phase of the method that contains the step.
        """
        start = max((start for start in self.phases if start <= step), default=0)
        start = start if gains(self.plan, start) else None
        if start not in self._by_phase:
            program = copy.copy(self)
            program.graph = nnx.split(nm.nnx.phase(nnx.clone(self.model), start))[0]
            program.train = self._train_of(program)
            self._by_phase[start] = program
        return self._by_phase[start]

    # ---- several runs ----

    def beside(self, count: int) -> "Program":
        """Return the program of so many runs at once. Their states are one state with one more axis (`RUNS`)."""
        if count not in self._programs:
            self._programs[count] = self._made_for(count)
        return self._programs[count]

    def _made_for(self, count: int) -> "Program":
        program = copy.copy(self.one)
        program.count = count
        if self.one.explicit:  # vmap has no rule for types of all operations
            program.explicit, program.untyped = False, "runs side by side share a mesh of automatic axes"
        program.shapes = jax.tree.map(partial(shards.stacked, count), self.one.shapes)
        program.shapes = program.shapes._replace(step=self.one.shapes.step)
        places = jax.tree.map(_sharding, program.shapes)
        program._set_functions(places, lambda function, *axes, out=0: jax.vmap(function, axes, out))
        program._stack = jax.jit(stack, out_shardings=places)
        program._part = jax.jit(part, out_shardings=jax.tree.map(_sharding, self.one.shapes))
        return program

    def together(self, states: Sequence[State]) -> State:
        """Return the state of all runs, made of their own states."""
        return states[0] if self.count == 1 else self._stack(*states)

    def part(self, state: State, number: int) -> State:
        """Return the state of one run, as it would be alone."""
        return state if self.count == 1 else self._part(state, number)

    # ---- the first state ----

    def init(self, seed: Any) -> State:
        """Return the first state of the run with this seed."""
        return self.compiled_init(seed, self.pretrained)

    def _init(self, seed: jax.Array, pretrained: dict[str, jax.Array]) -> State:
        key = jax.random.key(seed)
        model = self.task.make(nnx.Rngs(key))
        put(model, pretrained)
        model = nm.nnx.sparsify(model, self.recipe, seed=key)
        _, params, rest = nnx.split(model, nnx.Param, ...)
        params, rest = nnx.as_pure(params), nnx.as_pure(rest)
        ema = jax.tree.map(jnp.copy, (params, rest)) if self.config.ema else ()
        return State(jnp.int32(0), seed, params, rest, self.tx.init(params), ema)

    def renewed(self, state: State) -> State:
        """Return a state whose scales and held masks are made again from its weights: it is of another method."""

        def renew(state: State) -> State:
            model = nnx.merge(self.graph, state.params, state.rest, copy=True)
            rest = nnx.as_pure(nnx.split(nm.nnx.reset_state(model), nnx.Param, ...)[2])
            kinds = nnx.split(self.model, nnx.Param, ...)[2]
            is_variable = lambda v: isinstance(v, nnx.Variable)
            own = lambda kind, old, new: new if isinstance(kind, nm.nnx.SparsityVariable) else old
            copied = lambda old: jax.tree.map(own, kinds, old, rest, is_leaf=is_variable)
            return state._replace(rest=rest, ema=(state.ema[0], copied(state.ema[1])) if state.ema else state.ema)

        return jax.jit(renew, out_shardings=jax.tree.map(lambda v: v.sharding, state))(state)

    # ---- the step ----

    def train_step(self, state: State, arrays: Any) -> tuple[State, dict]:
        """Take a step: gradients of all micro-batches, the optimizer's update, the averages."""
        config, params = self.config, state.params
        with jax.named_scope("input"):  # a profile uses these names to show where the time goes
            batch = self.task.batch(arrays, state.seed, state.step, self.mesh)
        now = self._now(state)
        if config.accumulate == 1:
            rest, (grads, figures) = self._gradients(params, now, {}, state.rest, (0, batch))
        else:
            forms = self._packed(params, state.rest, now)
            rest, (grads, figures) = self._accumulated(partial(self._gradients, params, now, forms), state.rest, batch)
        with jax.named_scope("update"):
            rest = self._observed(params, rest, grads)
            masks = {"masks": self._masks(state._replace(rest=rest))} if config.masked_decay else {}
            updates, opt = self.tx.update(grads, state.opt, params, **masks)
            params = optax.apply_updates(params, updates)
            ema = averaged(state.ema, (params, rest), self.model, config.ema, state.step) if config.ema else ()
            rate = jnp.asarray(self.rate(state.step), jnp.float32)
            figures |= {"gradient_norm": optax.tree.norm(grads), "learning_rate": rate}
        return State(state.step + 1, state.seed, params, rest, opt, ema), figures

    def _observed(self, params: Any, rest: Any, grads: Any) -> Any:
        """Return the `rest` after the gradients of a step, by which some pruners choose."""
        if not any(reads_gradient(layer.sparsity) for layer in self.plan.layers):
            return rest
        model = nnx.merge(self.graph, params, rest, copy=True)
        nm.nnx.observe(model, grads)
        return nnx.as_pure(nnx.split(model, nnx.Param, ...)[2])

    def _now(self, state: State) -> jax.Array:
        """Return the step that methods read: the run's, or for STEP the steps since its weights are sparse."""
        return nm.optim.since(state.opt) if self.starts_late else state.step

    def _gradients(self, params: Any, now: jax.Array, forms: dict, rest: Any, numbered: tuple) -> tuple[Any, tuple]:
        """Return the new `rest` of a micro-batch, its gradients and its figures.

        Args:
          params: The parameters.
          now: The time of the methods.
          forms: The packed forms of the weights, or {} to pack them here.
          rest: What is no parameter.
          numbered: The number of the micro-batch in its step, and the micro-batch.
        """
        number, batch = numbered
        batch = jax.lax.with_sharding_constraint(batch, self.split)
        model = nnx.merge(self.graph, params, rest)
        nm.nnx.set_step(model, now, number, since=now - 1)  # runs side by side have one step
        timed = nnx.as_pure(nnx.split(model, nnx.Param, ...)[2])
        loss = partial(self._loss, rest=timed, batch=batch, forms=forms)
        grads, (figures, new) = jax.grad(loss, has_aux=True)(params)
        if self.frozen:  # zeros here, so that their products are not computed
            grads = settings.scaled(grads, defaultdict(lambda: 1.0, dict.fromkeys(self.frozen, 0.0)))
        return new, (jax.lax.with_sharding_constraint(grads, self._places()[0]), figures)

    def _loss(self, params: Any, rest: Any, batch: Any, forms: dict) -> tuple[jax.Array, tuple[dict, Any]]:
        """Return the loss of a micro-batch; and its figures and the new `rest`."""
        places = shards.in_use(self._places(), self.mesh)
        in_use = jax.lax.with_sharding_constraint((params, rest), places)

        def computed(params: Any, rest: Any, batch: Any) -> tuple[jax.Array, tuple[dict, Any]]:
            model = nnx.merge(self.graph, params, rest, copy=True)
            model.train()
            with nm.nnx.packed(model, forms):
                value, figures = self.task.loss(model, batch)
            return value, ({"loss": value, **figures}, nnx.as_pure(nnx.split(model, nnx.Param, ...)[2]))

        if self.explicit:
            try:
                return shards.typed(computed, self.mesh, *places)(*in_use, batch)
            except Exception as error:  # of the task's loss; the plan has only the model
                self.explicit, self.untyped = False, f"the loss does not run on explicit axes: {_first_line(error)}"
                warnings.warn(f"XLA prunes, and no kernel does: {self.untyped}", stacklevel=2)
        return computed(*in_use, batch)

    def _places(self) -> tuple[Any, Any]:
        """Return the shardings of the parameters and of the rest, of one run."""
        return jax.tree.map(_sharding, (self.one.shapes.params, self.one.shapes.rest))

    def _packed(self, params: Any, rest: Any, now: jax.Array | int) -> dict:
        """Return the packed forms of the weights for all micro-steps of a step. A single one packs them itself."""
        if self.config.accumulate == 1:
            return {}
        model = nnx.merge(self.graph, params, rest, copy=True)
        model.train()
        nm.nnx.set_step(model, now, since=now - 1)
        return nm.nnx.pack(model, *self.task.example(self.micro_batch))

    def _accumulated(self, micro_step: Callable, rest: Any, batch: Any) -> tuple[Any, tuple]:
        """Return the means over micro-batches, which run one after another in the memory of one."""
        k = self.config.accumulate
        parts = jax.tree.map(lambda v: v.reshape(k, -1, *v.shape[1:]), batch)
        first = jax.eval_shape(micro_step, rest, (0, jax.tree.map(lambda v: v[0], parts)))[1]
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), first)

        def add(carry, numbered):
            new_rest, new = micro_step(carry[0], numbered)
            return (new_rest, jax.tree.map(lambda a, b: a + b / k, carry[1], new)), None

        return jax.lax.scan(add, (rest, zeros), (jnp.arange(k), parts))[0]

    # ---- scores ----

    def _model(self, state: State) -> nnx.Module:
        """Return the model that is evaluated: of the averages, if there are any."""
        params_and_rest = state.ema if self.config.ema else (state.params, state.rest)
        model = nnx.merge(self.graph, *params_and_rest, copy=True)
        model.eval()
        return model

    def _score(self, state: State, batch: Any) -> dict:
        return self.task.score(self._model(state), jax.lax.with_sharding_constraint(batch, self.split))

    def _harden(self, state: State) -> Any:
        return nnx.as_pure(nnx.split(nm.nnx.harden(self._model(state)))[1])

    def _harden_graph(self) -> nnx.GraphDef:
        return jax.eval_shape(lambda state: nnx.split(nm.nnx.harden(self._model(state))), self.shapes)[0]

    def _hard_score(self, hard: Any, batch: Any) -> dict:
        model = nnx.merge(self.hardened_graph, hard)
        return self.task.score(model, jax.lax.with_sharding_constraint(batch, self.split))

    def evaluate(self, state: State, split: str = "test") -> dict[str, Any]:
        """Return means over a split, of the weights in training and of the hardened weights of inference.

        Args:
          state: The state of the runs.
          split: "validation" or "test".

        Returns:
          Numbers by name, "hardened_..." for hardened weights; arrays (runs,) if there are several runs.
        """
        hard, sums, hard_sums = None if self.hardened_graph is None else self.harden(state), [], []
        for batch in self.task.evaluation(split, self.mesh):  # fetched one by one, so that the host does not run ahead
            sums.append(jax.device_get(self.score(state, batch)))
            if hard is not None:
                hard_sums.append(jax.device_get(self.hard_score(hard, batch)))
        return _means(sums) | {f"hardened_{name}": value for name, value in _means(hard_sums).items()}

    # ---- measures ----

    def _masks(self, state: State) -> Any:
        model = nnx.merge(self.graph, state.params, state.rest)  # weights that are drawn may have no mask
        return {} if self.hardened_graph is None else nnx.as_pure(nm.nnx.masks(model))

    def _measure(self, state: State, arrays: Any) -> dict[str, dict]:
        """Return what pruning does to the weights and to the gradients of a micro-batch: tables by layer."""
        batch = self.task.batch(arrays, state.seed, state.step, self.mesh)
        batch = jax.tree.map(lambda v: v[: self.micro_batch], batch)
        model = nnx.merge(self.graph, state.params, state.rest, copy=True)
        model.train()
        now = self._now(state)
        nm.nnx.set_step(model, now, since=now - 1)
        weights = nm.nnx.weights(model)
        errors = nm.nnx.gradient_errors(model, lambda model: self.task.loss(model, batch)[0])
        tables = {}
        if weights:
            tables["density"] = {path: value.density for path, value in weights.items()}
            tables["weight_error"] = {path: value.error for path, value in weights.items()}
        if errors:
            for name in ("variance", "bias", "cosine"):
                tables[f"gradient_{name}"] = {path: getattr(value, name) for path, value in errors.items()}
        return tables

    def export(self, state: State, directory: Path, which: str = "the last step") -> str:
        """Write the hardened model of a step to a folder, if the task can. Return a sentence about it, or ""."""
        if (export := getattr(self.task, "export", None)) is None:
            return ""
        if self.hardened_graph is None:
            return f"no checkpoint is written for other libraries: {self.hardening_refusal}"
        hard = jax.device_put(self.harden(state), shards.whole(self.mesh))
        return export(nnx.merge(self.hardened_graph, hard), directory, which) if processes.first() else ""

    def pictures(self, state: State) -> dict[str, Any]:
        """Return what the report shows of the final model: a corner of a weight's mask, and the task's pictures."""
        if self.hardened_graph is None:
            return self.task.pictures(*nnx.split(self._model(state)), self.mesh)
        pictures = self.task.pictures(self.hardened_graph, self.harden(state), self.mesh)
        masks = jax.device_put(self.masks(state), shards.whole(self.mesh))
        return pictures | hardest.corner(masks, nm.nnx.patterns(self.model))


def _means(sums: list[dict]) -> dict[str, Any]:
    """Return the means over all batches of what `Task.score` sums."""
    if not sums:
        return {}
    total = {name: np.sum([part[name] for part in sums], 0, np.float64) for name in sums[0]}
    count = total.pop("count")
    return {name: value / count for name, value in total.items()}


def gains(plan: nm.nnx.Plan, step: int) -> bool:
    """Return whether more products run in a fast way in the phase of a step than in one program for all steps.

    Args:
      plan: The plan.
      step: The step.
    """
    return bool(plan.phases) and any(plan.runs_at(step).get(how, 0) > plan.runs.get(how, 0) for how in FAST)


def changes(plan: nm.nnx.Plan, steps: int) -> tuple[int, ...]:
    """Return the steps at which a run changes its program: to or from a phase that gains.

    Args:
      plan: The plan.
      steps: The number of steps of the run.
    """
    starts = [0, *plan.phases]
    now = [gains(plan, start) for start in starts]
    changed = zip(starts, now, [False, *now], strict=False)
    return tuple(start for start, gains_now, before in changed if start < steps and (gains_now or before))
