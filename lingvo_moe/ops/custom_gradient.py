"""Hand-written gradients whose operations are named by scope, as those of derived gradients are."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
  """tf.custom_gradient with the gradient under the name scopes of the function; addons/analysis/parts.py reads them."""

  @functools.wraps(function)
  @tf.custom_gradient
  def run(*args):
    scope = tf.get_current_name_scope()
    results, grad = function(*args)

    def grad_in_scope(*dresults):
      with tf.name_scope(f'gradient_tape/{scope}/' if scope else 'gradient_tape/'):
        return grad(*dresults)

    return results, grad_in_scope

  return run


def pull_back(
  function: Callable[..., Any], args: Sequence[tf.Tensor], dresults: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
  """Runs a function and returns the vjp of its results, in nest order, for its arguments, which are tensors."""
  args = [tf.identity(x) for x in args]  # new tensors: nothing is known of how they were made
  with tf.GradientTape() as tape:
    tape.watch(args)
    results = tf.nest.flatten(function(*args))
  real = [(r, dr) for r, dr in zip(results, dresults, strict=True) if r.dtype.is_floating]
  grads = tape.gradient([r for r, _ in real], args, output_gradients=[dr for _, dr in real])
  return [tf.zeros_like(a) if g is None else tf.convert_to_tensor(g) for a, g in zip(args, grads, strict=True)]
