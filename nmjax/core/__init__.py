"""The basis of everything else: values, pruners and their context, groups along any axis, random bits, JAX versions."""
