"""Weights for tests of layers and models."""

from typing import Any

import tensorflow as tf

from lingvo_moe.core import weights


def theta_of(part: Any, seed: int = 0, scale: float = 0.5) -> weights.Theta:
  """Weights of whatever has weights() that leave nothing at 0 or 1, so that a forgotten bias shows."""
  flat = weights.flatten(part.weights())
  return weights.unflatten(
    {name: tf.random.stateless_normal(spec.shape, [seed, i]) * scale for i, (name, spec) in enumerate(flat.items())}
  )
