"""SavedModel of a function of text: runs in any process with TensorFlow and tensorflow_text, without this package.

saved_model.pb, variables/   TensorFlow's; signature 'serving_default'
assets.extra/about.json      what its inputs and outputs are, and the model
"""

import inspect
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core import errors
from lingvo_moe.core.errors import UserError
from lingvo_moe.models.export_forms import TextFunction
from lingvo_moe.ops import backend as backend_lib
from lingvo_moe.ops import cpu


def save(folder: str, function: TextFunction, weights: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
  """Writes a SavedModel of a function of text, with weights by flat name; `about` is more to note in about.json.

  Raises:
    UserError: it could not be written, as on a full disk.
  """
  module = tf.Module()
  module.weights = {name: tf.Variable(value, trainable=False, name=name) for name, value in weights.items()}
  module.resources = list(function.resources)

  def run(*arguments, **named):
    with backend_lib.use(cpu.saved()):
      given = [*arguments, *(named[name] for name in list(function.inputs)[len(arguments) :])]
      return function({name: w.value() for name, w in module.weights.items()}, *given)

  kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
  run.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in function.inputs])
  signature = [tf.TensorSpec(spec.shape, spec.dtype, name) for name, spec in function.inputs.items()]
  traced = tf.function(run, input_signature=signature, autograph=False)
  setattr(module, function.name, traced)
  options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
  try:
    tf.saved_model.save(module, folder, {'serving_default': traced}, options)
  except (tf.errors.ResourceExhaustedError, tf.errors.PermissionDeniedError, tf.errors.UnavailableError) as e:
    raise UserError(f'a SavedModel could not be written to {folder} ({errors.reason(e)}): make room there') from None
  extra = pathlib.Path(folder, 'assets.extra')
  extra.mkdir()
  about = json.dumps({**about, **function.about}, indent=2, ensure_ascii=False)
  (extra / 'about.json').write_text(about, encoding='utf-8')
