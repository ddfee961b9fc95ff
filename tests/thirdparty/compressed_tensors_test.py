"""Quantized checkpoints, as transformers reads them through compressed-tensors. Both need torch, 3 GB: by hand."""

from pathlib import Path

import numpy as np
import pytest

import nmjax as nm
from nmjax import checkpoints

pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the packages

GOLDEN = Path(__file__).parent.parent / "checkpoints/golden"


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("model", ["llama", "qwen3", "bert", "modernbert"])
def test_transformers_decompresses_the_same_weights(tmp_path, model, kind):
    """And compressed-tensors makes the same 8 bits of the weights and these scales."""
    import torch
    from compressed_tensors.quantization import QuantizationConfig, quantize
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    recipe = nm.Recipe({"blocks/.*": "ste(2,4)", ".*": "dense"})
    checkpoints.prune(GOLDEN / model, tmp_path / "pruned", recipe)
    names = checkpoints.quantize(tmp_path / "pruned", tmp_path / "small", kind)
    before, small = checkpoints.read(tmp_path / "pruned"), checkpoints.read(tmp_path / "small")
    auto = AutoModel if "bert" in model else AutoModelForCausalLM
    kept = auto.from_pretrained(tmp_path / "small")
    linear = {f"{name}.weight" for name, one in kept.named_modules() if hasattr(one, "quantization_scheme")}
    assert linear == set(names)
    assert all(kept.get_parameter(name).dtype.itemsize == 1 for name in names)
    about = CompressedTensorsConfig(dequantize=True)
    found = auto.from_pretrained(tmp_path / "small", quantization_config=about).state_dict()
    assert set(names) < set(found)
    for name in before:
        if name in found:
            wanted = np.array(before[name], np.float32)
            if name in names:
                wanted = np.array(small[name], np.float32) * np.array(small[f"{name}_scale"])
            np.testing.assert_array_equal(found[name].float().numpy(), wanted, err_msg=name)
    scheme = QuantizationConfig(**checkpoints.tensors.read_config(tmp_path / "small")["quantization_config"])
    args = scheme.config_groups["group_0"].weights
    for name in names:
        w, scales = (torch.tensor(np.array(v)) for v in (before[name], small[f"{name}_scale"]))
        theirs = quantize(w, scales, zero_point=None, args=args, dtype=args.pytorch_dtype())
        np.testing.assert_array_equal(theirs.float().numpy(), np.array(small[name], np.float32), err_msg=name)
