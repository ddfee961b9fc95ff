"""Registers layers of other libraries by name, so that no library is imported.

Each file says on which version it was tried.
"""

from nmjax.nnx.others import bonsai as bonsai, maxtext as maxtext, tunix as tunix
