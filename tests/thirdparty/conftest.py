"""Other libraries add arrays of other ranks and dtypes, which our own tests forbid."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
