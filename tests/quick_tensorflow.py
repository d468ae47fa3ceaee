"""Import of TensorFlow without the installed packages that it would import and that no test needs."""

import sys


def load() -> None:
  """Imports TensorFlow; afterwards JAX and Matplotlib can be imported as ever. They would take 2 of 7 seconds."""
  left_out = [name for name in ('jax', 'matplotlib') if name not in sys.modules]
  sys.modules.update(dict.fromkeys(left_out))  # as if they were not installed
  try:
    import tensorflow  # noqa: F401
  finally:
    for name in left_out:
      del sys.modules[name]
