"""Types as a user's checker sees them: pyright and mypy agree on what calls give, and refuse what is wrong."""

import pytest

from tests import snippets

RIGHT = """
from typing import Any, assert_type
import jax, jax.numpy as jnp, nmjax as nm
from flax import nnx
from flax.core import FrozenDict
from nmjax.programs.states import WeightState

class Net(nnx.Module): ...

def on_nnx(model: Net, layer: nnx.Linear, recipe: nm.Recipe) -> None:
    assert_type(nm.nnx.sparsify(model, recipe), Net)
    assert_type(nm.nnx.harden(model), Net)
    assert_type(nm.nnx.reset_state(model), Net)
    assert_type(nm.nnx.harden(nm.nnx.sparsify(layer, recipe)), nnx.Linear)

def on_linen(variables: dict[str, Any], frozen: FrozenDict[str, Any]) -> None:
    assert_type(nm.linen.set_step(variables, 1), dict[str, Any])
    assert_type(nm.linen.reset_state(variables), dict[str, Any])
    assert_type(nm.linen.harden(variables), dict[str, Any])
    assert_type(nm.linen.harden(frozen), FrozenDict[str, Any])

def on_functions(f: nm.transform, params: list[jax.Array]) -> None:
    state = f.init(params, jnp.ones(4))
    assert_type(f.set_step(params, state, 1), dict[str, WeightState])
    assert_type(f.harden(params, state), tuple[list[jax.Array], dict[str, WeightState]])

def on_values(texts: dict[str, str], values: dict[str, nm.Sparsity], pairs: list[tuple[str, str]]) -> None:
    nm.Recipe(texts), nm.Recipe(values), nm.Recipe(pairs)
    nm.Recipe({"up": "ste(2,4)", ".*": nm.Sparsity()}), nm.Recipe((("up", "ste(2,4)"), (".*", nm.Sparsity())))
    assert_type(nm.Recipe(texts)("up"), nm.Sparsity)
    assert_type(nm.parse("ste(2,4)"), nm.Sparsity)
    assert_type(nm.methods.s_ste(2, 4), nm.Sparsity)
    assert_type(nm.mvue(2, 4), nm.mvue)
    assert_type(nm.prune(nm.mse(2, 4), jnp.ones(4)), jax.Array)
"""

WRONG = """
from typing import assert_type
import nmjax as nm
from flax import nnx

def wrong(layer: nnx.Linear, recipe: nm.Recipe) -> None:
    assert_type(nm.nnx.harden(layer), nnx.Conv)
    nm.nnx.harden(layer).weight
    nm.Recipe((".*", "dense"))
    nm.Recipe({".*": 1})
    nm.mse("2", 4)
    nm.methods.s_stee(2, 4)
"""


@pytest.mark.processes
def test_pyright_and_mypy_agree_with_what_calls_give(tmp_path):
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    found = snippets.checked(tmp_path)
    assert [finding for finding in found if finding.file == "right.py"] == []
    lines = [(finding.checker, finding.line) for finding in found if finding.file == "wrong.py"]
    assert sorted(set(lines)) == [(checker, line) for checker in ("mypy", "pyright") for line in range(7, 13)]


PAGE = """# A page

A snippet:

```python
>>> y = f(1)
>>> for i in range(2):
...     print(i)
0
1
>>> f("a")
Traceback (most recent call last):
TypeError: f takes a number.

```

```console
$ python page.py
```

```python
z = y

print(z)
```
"""


def test_a_page_keeps_its_lines():
    lines = snippets.code(PAGE).splitlines()
    assert {number: line for number, line in enumerate(lines, 1) if line} == {
        6: "y = f(1)", 7: "for i in range(2):", 8: "    print(i)", 22: "z = y", 24: "print(z)",
    }  # fmt: skip


def test_every_page_with_code_is_checked():
    """Snippets come from README and docs/, and not from generated pages."""
    names = {str(page.relative_to(snippets.ROOT)) for page in snippets.PAGES}
    with_code = {
        str(page.relative_to(snippets.ROOT))
        for page in [snippets.ROOT / "README.md", *(snippets.ROOT / "docs").rglob("*.md")]
        if "```python" in page.read_text()
    }
    assert {name for name in with_code if "/_" not in name} <= names
    assert len(with_code) > 20
