"""The doors of layers of other libraries, declared by name, so that no library is imported.

Each file says on which version its doors were tried.
"""

from nmjax.nnx.others import bonsai as bonsai, maxtext as maxtext, tunix as tunix
