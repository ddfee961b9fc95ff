"""Tests of the memory of a process."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import jax, jax.numpy as jnp
from experiments.training import device
kept = sys.argv[1] == "keep" and device.keep_memory()
@jax.jit
def step(x):
    return (x @ x.T) @ x  # it needs a temporary array of 64 MB
x = jnp.ones((4096, 64))
for _ in range(10):
    step(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(40):
    step(x).block_until_ready()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(os, "confstr") or "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="needs glibc")
@pytest.mark.processes
def test_a_step_touches_hardly_any_new_pages_if_memory_is_kept():
    """Its temporary array has 2**14 pages, and it runs 40 times. Kept memory may still grow a few times."""
    found = {}
    for word in ("keep", "return"):
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        run = subprocess.run([sys.executable, "-c", SCRIPT, word], env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        kept, faults = run.stdout.split()
        assert kept == str(word == "keep")
        found[word] = int(faults)
    assert found["keep"] < 10 * 2**14, found
    assert found["return"] > 30 * 2**14, found
