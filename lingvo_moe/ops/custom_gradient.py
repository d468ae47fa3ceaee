"""Hand-written gradients whose operations are named by scope, as those of derived gradients are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
  """tf.custom_gradient with the gradient under the name scopes of the function, which analysis/parts.py reads."""

  @functools.wraps(function)
  def run(*args):
    scope = tf.get_current_name_scope()

    @tf.custom_gradient
    def scoped(*args):
      results, grad = function(*args)

      def grad_in_scope(*dresults):
        with tf.name_scope(f'gradient_tape/{scope}/' if scope else 'gradient_tape/'):
          return grad(*dresults)

      return results, grad_in_scope

    return scoped(*args)

  return run
