"""The strict environment of every test and doctest, set before jax is imported."""

import collections
import gc
import importlib.metadata
import os
import pathlib
import shutil
import tempfile
import time

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
os.environ.setdefault("NPROC", "16")  # threads of XLA: simulated kernels block some of them
if os.environ["JAX_PLATFORMS"] == "cpu":  # tests compile much and compute little: optimising costs them two fifths
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1 --xla_cpu_emitter_verification_level=0"
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # halves compilation; later versions lack the flag
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # what a run has compiled serves the next
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="nmjax-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

gc.set_threshold(100_000, 20, 50)  # what traces makes many objects, and hardly any garbage

# The interpreter of kernels in 0.10.2 compiles each block of threads again: seconds a product.
if jax.__version_info__[:2] == (0, 10):
    from jax._src.pallas.mosaic.interpret import thread_map

    def _run(jaxpr, consts, *args):
        jax.core.eval_jaxpr(jaxpr, consts, *args)

    thread_map._run_jaxpr = lambda jaxpr, consts, *args: (
        jax.jit(_run, static_argnums=0).trace(jaxpr, consts, *args).lower().compile()(consts, *args)
    )

jax.config.update("jax_enable_compilation_cache", False)  # asking it costs more than it saves, but for tests of runs
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("nmjax", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile("nmjax")


SLOW = ("kernels", "processes", "notebooks", "slow")
collect_ignore_glob = ["docs/_build/*", "docs/notebooks/*", "docs/*.py", "experiments/results/*"]


def pytest_addoption(parser):
    parser.addoption("--shard", help="I/N: run every N-th test from the I-th on, to split the tests over N machines")
    parser.addoption("--minutes", type=float, help="begin no test after so many minutes: it is skipped, and counted")


BEGAN = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skip what a slow machine has no time for."""
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - BEGAN > 60 * minutes:
        pytest.skip(f"the {minutes:g} minutes of --minutes were over")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Give each test its tier; then, of the tests that were asked for, keep those of the shard."""
    sampled, slow = collections.Counter(), collections.defaultdict(list)
    for item in items:
        test = item.nodeid.partition("[")[0]
        if item.path.suffix == ".md":
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("sampled"):
            if sampled[test] % 7:  # no factor of grids of 2, 4 or 8: those would give the same column each time
                item.add_marker(pytest.mark.slow)
            sampled[test] += 1
        if any(item.get_closest_marker(name) for name in SLOW):
            slow[test].append(item)
    for cases in slow.values():
        seen = set()
        for i, item in enumerate(cases):
            params = item.callspec.params if hasattr(item, "callspec") else {}
            values = {(name, repr(value)) for name, value in params.items()}
            if len(cases) > 3 and i % 3 and (len(params) < 2 or values <= seen):  # each value of a grid is tested
                item.add_marker(pytest.mark.rare)
            else:
                seen |= values
    yield
    if shard := config.getoption("--shard"):
        part, parts = map(int, shard.split("/"))
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % parts != part - 1])
        items[:] = items[part - 1 :: parts]


@pytest.fixture(autouse=True, scope="module")
def _programs_are_freed():
    """Free compiled programs before there are too many memory mappings: Linux allows 65,530, then LLVM aborts."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def _names_for_doctests(request, doctest_namespace):
    """Give jax, jnp and np to the examples of docstrings. Pages import what they use."""
    doctest_namespace.clear()
    if request.path.suffix == ".py":
        doctest_namespace.update(jax=jax, jnp=jnp, np=np)


def pytest_unconfigure():
    made = os.environ["JAX_COMPILATION_CACHE_DIR"]
    if os.path.basename(made).startswith("nmjax-tests-") and "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(made, ignore_errors=True)
