"""A user's network as a pure function of its input: nothing else touches modules, modes, buffers or hooks."""
