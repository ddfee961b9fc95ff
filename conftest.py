"""The strict environment of every test and doctest, set before jax is imported."""

import os

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
if os.environ["JAX_PLATFORMS"] == "cpu":  # tests compile much and compute little: optimising costs them two fifths
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("nmjax", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile("nmjax")


@pytest.fixture(autouse=True)
def _names_for_doctests(doctest_namespace):
    doctest_namespace.update(jax=jax, jnp=jnp, np=np)
