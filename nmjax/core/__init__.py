"""What everything is made of: values, pruners and their context, groups along any axis, random bits, JAX versions."""
