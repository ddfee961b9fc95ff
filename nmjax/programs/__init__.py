"""Products in the traced programs of functions that nmjax does not know."""
