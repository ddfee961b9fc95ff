"""Checkpoints: files of named tensors in the format safetensors, which other libraries read and write.

A file is opened by memory map, so only the tensors that are used are read. It is written whole or not at all. Tensors
that are read and written again keep their names, order, bytes and metadata.

A `Table` says which tensor is which parameter of a model. It works in both directions.

>>> import tempfile
>>> import numpy as np
>>> with tempfile.TemporaryDirectory() as folder:
...     write(folder + "/model.safetensors", {"w": np.array([1, 0, 0, 2], np.float32)})
...     {name: value.tolist() for name, value in read(folder).items()}
{'w': [1.0, 0.0, 0.0, 2.0]}
"""

from nmjax.checkpoints.families import Family as Family, clip_text as clip_text, clip_vision as clip_vision
from nmjax.checkpoints.gguf import Gguf as Gguf
from nmjax.checkpoints.gguf_models import convert_gguf as convert_gguf
from nmjax.checkpoints.models import (
    architecture as architecture,
    load as load,
    parameters as parameters,
    quantize as quantize,
    save as save,
)
from nmjax.checkpoints.names import Rename as Rename, Table as Table
from nmjax.checkpoints.onnx import write_onnx as write_onnx
from nmjax.checkpoints.streaming import prune as prune, prune_tensors as prune_tensors
from nmjax.checkpoints.tensors import (
    CheckpointError as CheckpointError,
    Tensors as Tensors,
    read as read,
    write as write,
)
from nmjax.checkpoints.verifying import Verified as Verified, verify as verify
