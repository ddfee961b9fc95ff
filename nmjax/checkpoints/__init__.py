"""Checkpoints: files of tensors, as other libraries write and read them."""

from nmjax.checkpoints.tensors import CheckpointError as CheckpointError, Tensors as Tensors
