"""What a run computes, as compiled functions of its state: the first state, the step, the scores, the measures.

A *task* (`experiments/training/image.py`, `experiments/training/text.py`) brings the model and the data.
"""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nmjax as nm
from experiments.errors import Mistake
from experiments.scale import shards
from experiments.training import settings
from experiments.training.task import Task


class State(NamedTuple):
    """All that a run is at a step."""

    step: jax.Array
    seed: jax.Array
    params: Any
    rest: Any  # what is no parameter: means of BatchNorm; noise, time, masks and scales of nmjax
    opt: Any
    ema: Any  # averages of params and of rest's floats (means of BatchNorm), or ()


RUNS: Any = State(None, 0, 0, 0, 0, 0)  # where a state of several runs has their axis; they are all at one step


class Program:
    """The functions of a run, compiled once: for other seeds and other data of the same shapes too.

    Those of `beside` are of several runs at once, whose states are one state with an axis more.
    """

    def __init__(self, config, task: Task):
        self.config, self.task = config, task
        self.total = settings.steps(config, task.examples)
        self.evaluations = settings.duration(config.evaluate, self.total, "config.evaluate") or self.total
        self.measures = settings.duration(config.measure, self.total, "config.measure")  # 0: never
        self.recipe = settings.recipe(config, self.total)
        self.rate = settings.learning_rate(config, self.total)
        self.steps_since = (
            settings.call(settings.in_steps(config.optimizer, self.total), "config.optimizer")[0] == "step_adam"
        )
        self.tx = settings.optimizer(config, self.rate, self.total)
        self.mesh = shards.mesh(config)
        if (config.batch // config.accumulate) % shards.parts(self.mesh):
            raise Mistake(
                f"config.batch={config.batch} in {config.accumulate} micro-batches leaves {config.batch // config.accumulate} "
                f"examples, which {shards.parts(self.mesh)} devices cannot share evenly."
            )
        with settings.as_mistake("the model"):
            nnx.eval_shape(lambda: task.make(nnx.Rngs(0)))
        with settings.as_mistake("config.rules and config.sparsity"):
            self.model = nnx.eval_shape(lambda: nm.nnx.sparsify(task.make(nnx.Rngs(0)), self.recipe))
            _, params, rest = nnx.split(self.model, nnx.Param, ...)
            self.graph = nnx.split(self.model)[0]
            forms = jax.eval_shape(self._packed, nnx.as_pure(params), nnx.as_pure(rest), 0)
            with nm.nnx.packed(self.model, forms):
                self.plan = nm.nnx.plan(self.model, *task.example(config.batch // config.accumulate))
        if self.plan.refused:
            reasons = "; ".join(f"{path}: {reason}" for path, reason in self.plan.refused[:3])
            reasons += f"; and {len(self.plan.refused) - 3} more" if len(self.plan.refused) > 3 else ""
            raise Mistake(f"config.rules and config.sparsity cannot be carried out: {reasons}")
        # of a step on average; at its sparsest where only the run will tell when it gets sparse
        self.flops = self.plan.training if self.steps_since else self.plan.over(self.total)
        if all(layer.sparsity == nm.Sparsity() for layer in self.plan.layers):
            self.measures = 0  # there is nothing to measure
        self.split = shards.batch(self.mesh)
        state = jax.eval_shape(self._init, jax.ShapeDtypeStruct((), jnp.uint32))
        where = shards.of_state(state, self.model, self.mesh)
        self.init = jax.jit(self._init, out_shardings=where)
        placed = lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at)
        self.shapes = jax.tree.map(placed, state, where)
        self.one, self.count, self._made = self, 1, {1: self}
        self._functions(where, lambda f, *axes, **_: f)
        try:
            self.graph_of_hard, self.no_hard = self._harden_graph(), ""
        except ValueError as error:  # as of weights that are drawn anew at every step
            self.graph_of_hard, self.no_hard = None, str(error)

    def _functions(self, where: State, over: Callable) -> None:
        """What is compiled of a state; ``over(f, axis, ...)`` is f over the runs that lie along these axes of what it takes."""
        whole = shards.whole(self.mesh)  # every process reads it
        train, score, hard = over(self._train, RUNS, None, out=(RUNS, 0)), self._score, self._hard_score
        self.train = jax.jit(train, donate_argnums=0, out_shardings=(where, whole))
        self.score = jax.jit(over(score, RUNS, None), out_shardings=whole)
        self.hard_score = jax.jit(over(hard, 0, None), out_shardings=whole)
        self.harden = jax.jit(over(self._harden, RUNS))
        self.measure = jax.jit(over(self._measure, RUNS, None), out_shardings=whole)
        self.masks = jax.jit(over(self._masks, RUNS))
        self.flips = jax.jit(over(nm.metrics.flip_rates, 0, 0), out_shardings=whole)

    # ---- several runs ----

    def beside(self, count: int) -> "Program":
        """That of so many runs at once, which is made once."""
        if count not in self._made:
            made = self._made[count] = copy.copy(self.one)
            made.count, one = count, self.one.shapes
            made.shapes = jax.tree.map(partial(shards.stacked, count), one)._replace(step=one.step)
            where = jax.tree.map(lambda s: s.sharding, made.shapes)
            made._functions(where, lambda f, *axes, out=0: jax.vmap(f, axes, out))
            made._stack = jax.jit(_stack, out_shardings=where)
            made._part = jax.jit(_part, out_shardings=jax.tree.map(lambda s: s.sharding, one))
        return self._made[count]

    def together(self, states: Sequence[State]) -> State:
        """The state of all runs, out of those of each."""
        return states[0] if self.count == 1 else self._stack(*states)

    def part(self, state: State, number: int) -> State:
        """The state of one of the runs, as it would be alone."""
        return state if self.count == 1 else self._part(state, number)

    def compile(self, arrays, measure: bool) -> None:
        """The functions that a run begins with, side by side; their first calls find them compiled."""
        state = self.shapes
        jobs = [(self.train, (state, arrays)), (self.init, (jnp.uint32(0),))]
        jobs += [(self.measure, (state, arrays)), (self.masks, (state,))] * measure
        with ThreadPoolExecutor() as pool:
            for done in [pool.submit(lambda f, given: f.lower(*given).compile(), *job) for job in jobs]:
                done.result()

    def _init(self, seed) -> State:
        key = jax.random.key(seed)
        model = nm.nnx.sparsify(self.task.make(nnx.Rngs(key)), self.recipe, key)
        _, params, rest = nnx.split(model, nnx.Param, ...)
        params, rest = nnx.as_pure(params), nnx.as_pure(rest)
        ema = jax.tree.map(jnp.copy, (params, rest)) if self.config.ema else ()
        return State(jnp.int32(0), seed, params, rest, self.tx.init(params), ema)

    # ---- the step ----

    def _train(self, state: State, arrays) -> tuple[State, dict]:
        config, params = self.config, state.params
        where = jax.tree.map(lambda shape: shape.sharding, (self.one.shapes.params, self.one.shapes.rest))
        batch = self.task.batch(arrays, state.seed, state.step, self.mesh)
        now = self._now(state)

        def micro(rest, numbered, forms=None):
            number, part = numbered
            part = jax.lax.with_sharding_constraint(part, self.split)
            model = nnx.merge(self.graph, params, rest)
            nm.nnx.set_step(model, now, number)
            rest = nnx.as_pure(nnx.split(model, nnx.Param, ...)[2])

            def loss(params):
                given = jax.lax.with_sharding_constraint((params, rest), shards.in_use(where, self.mesh))
                model = nnx.merge(self.graph, *given, copy=True)
                model.train()
                with nm.nnx.packed(model, forms or {}):
                    value, shown = self.task.loss(model, part)
                return value, ({"loss": value, **shown}, nnx.as_pure(nnx.split(model, nnx.Param, ...)[2]))

            grads, (shown, rest) = jax.grad(loss, has_aux=True)(params)
            return rest, (jax.lax.with_sharding_constraint(grads, where[0]), shown)

        if config.accumulate == 1:
            rest, (grads, shown) = micro(state.rest, (0, batch))
        else:
            forms = self._packed(params, state.rest, now)
            rest, (grads, shown) = self._accumulated(partial(micro, forms=forms), state.rest, batch)
        extra = {"masks": self._masks(state._replace(rest=rest))} if config.masked_decay else {}
        updates, opt = self.tx.update(grads, state.opt, params, **extra)
        params = optax.apply_updates(params, updates)
        ema = self._averaged(state, params, rest) if config.ema else ()
        shown |= {
            "gradient_norm": optax.tree.norm(grads),
            "learning_rate": jnp.asarray(self.rate(state.step), jnp.float32),
        }
        return State(state.step + 1, state.seed, params, rest, opt, ema), shown

    def _now(self, state: State):
        """The time of the methods: the step, or with STEP the steps since its weights are sparse."""
        return nm.optim.since(state.opt) if self.steps_since else state.step

    def _averaged(self, state: State, params, rest):
        """The averages, which the first steps enter faster, so that initial values are soon forgotten."""
        rate = 1 - jnp.minimum(self.config.ema, (1.0 + state.step) / (10.0 + state.step))
        mean = lambda old, new: (
            (old + rate * (new - old)).astype(new.dtype) if jnp.issubdtype(new.dtype, jnp.floating) else new
        )
        return jax.tree.map(mean, state.ema, (params, rest))

    def _packed(self, params, rest, now) -> dict:
        """The weights' packed forms, of which all micro-steps of a step make use."""
        if self.config.accumulate == 1:
            return {}
        model = nnx.merge(self.graph, params, rest, copy=True)
        model.train()
        nm.nnx.set_step(model, now)
        return nm.nnx.pack(model, *self.task.example(self.config.batch // self.config.accumulate))

    def _accumulated(self, micro, rest, batch):
        """The means over micro-batches, one after another, in the memory of one."""
        k = self.config.accumulate
        parts = jax.tree.map(lambda v: v.reshape(k, -1, *v.shape[1:]), batch)
        first = jax.eval_shape(micro, rest, (0, jax.tree.map(lambda v: v[0], parts)))[1]
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), first)

        def add(carry, numbered):
            rest, new = micro(carry[0], numbered)
            return (rest, jax.tree.map(lambda a, b: a + b / k, carry[1], new)), None

        return jax.lax.scan(add, (rest, zeros), (jnp.arange(k), parts))[0]

    # ---- what is asked of a state ----

    def _model(self, state: State):
        model = nnx.merge(self.graph, *(state.ema if self.config.ema else (state.params, state.rest)), copy=True)
        model.eval()
        return model

    def _score(self, state: State, batch):
        return self.task.score(self._model(state), jax.lax.with_sharding_constraint(batch, self.split))

    def _harden(self, state: State):
        return nnx.as_pure(nnx.split(nm.nnx.harden(self._model(state)))[1])

    def _harden_graph(self):
        return jax.eval_shape(lambda state: nnx.split(nm.nnx.harden(self._model(state))), self.shapes)[0]

    def _hard_score(self, hard, batch):
        model = nnx.merge(self.graph_of_hard, hard)
        return self.task.score(model, jax.lax.with_sharding_constraint(batch, self.split))

    def _masks(self, state: State):
        return nnx.as_pure(nm.nnx.masks(nnx.merge(self.graph, state.params, state.rest)))

    def _measure(self, state: State, arrays) -> dict:
        """What pruning does to the weights and to the gradients of a batch, by layer."""
        batch = self.task.batch(arrays, state.seed, state.step, self.mesh)
        batch = jax.tree.map(lambda v: v[: self.config.batch // self.config.accumulate], batch)
        model = nnx.merge(self.graph, state.params, state.rest, copy=True)
        model.train()
        nm.nnx.set_step(model, self._now(state))
        weights = nm.nnx.weights(model)
        errors = nm.nnx.gradient_errors(model, lambda model: self.task.loss(model, batch)[0])
        of = lambda found, name: {path: getattr(value, name) for path, value in found.items()}
        rows = [("density", weights, "density"), ("weight_error", weights, "error")]
        rows += [(f"gradient_{name}", errors, name) for name in ("variance", "bias", "cosine")]
        return {label: of(found, name) for label, found, name in rows if found}

    def evaluate(self, state: State) -> dict:
        """Means over the test split: of the weights in training, and of the hardened ones that inference will use. Of several
        runs each is an array."""
        hard = None if self.graph_of_hard is None else self.harden(state)
        sums, hard_sums = [], []
        for batch in self.task.tests(self.mesh):  # fetched one by one: the host does not run ahead
            sums.append(jax.device_get(self.score(state, batch)))
            if hard is not None:
                hard_sums.append(jax.device_get(self.hard_score(hard, batch)))
        return _means(sums) | {f"hardened_{name}": value for name, value in _means(hard_sums).items()}

    def pictures(self, state: State) -> dict:
        """What the report shows: a corner of a weight's mask, and what the task shows of the model."""
        if self.graph_of_hard is None:
            found = self.task.pictures(*nnx.split(self._model(state)), self.mesh)
        else:
            found = self.task.pictures(self.graph_of_hard, self.harden(state), self.mesh)
        kept = {"/".join(map(str, path)): mask for path, mask in nnx.to_flat_state(self.masks(state))}
        patterns = nm.nnx.patterns(self.model) if self.graph_of_hard is not None else {}
        for path, pattern in patterns.items():
            if pattern is not None and kept[path].ndim > 1:
                mask, axis = (
                    np.asarray(jax.device_put(kept[path], shards.whole(self.mesh))),
                    pattern.axes[-1] - kept[path].ndim + 2,
                )
                while mask.ndim > 2:  # of a stack its middle layer, of a convolution its middle tap
                    mask = mask[len(mask) // 2]
                return found | {
                    "mask": mask[:64, :64],
                    "mask_name": f"{path}, {pattern}",
                    "mask_axis": axis,
                    "mask_m": pattern.m,
                }
        return found


def _means(sums: list[dict]) -> dict:
    if not sums:
        return {}
    total = {name: np.sum([part[name] for part in sums], 0, np.float64) for name in sums[0]}
    count = total.pop("count")
    return {name: value / count for name, value in total.items()}


def _stack(*states: State) -> State:
    runs = [state._replace(step=()) for state in states]
    return jax.tree.map(lambda *values: jnp.stack(values), *runs)._replace(step=states[0].step)


def _part(state: State, number) -> State:
    return jax.tree.map(lambda value: value[number], state._replace(step=()))._replace(step=state.step)
