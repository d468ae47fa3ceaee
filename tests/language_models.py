"""Language models of any kind: continuations on a backend, and checks of what they are worth."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core import prng, weights
from lingvo_moe.ops import backend, cpu, xla
from lingvo_moe.search.beam_search import Hypotheses
from lingvo_moe.tasks.lm import generation
from lingvo_moe.tasks.task import task_of
from lingvo_moe.vocab.sentencepiece_vocab import BOS, EOS

PROMPTS = [np.array([BOS]), np.array([BOS, 5, 6, 7, 8, 9, 4, 5, 6, 11]), np.array([BOS, 9, 4])]
_BACKENDS = {'cpu': cpu.backend(training=False), 'xla': xla.BACKEND, 'reference': backend.REFERENCE}


def on_backend(kind: str, f: Callable, theta: dict, batch: dict[str, np.ndarray], traced: bool = False) -> Any:
  """f(theta, batch) on 'cpu', 'xla' or 'reference', as numpy values."""

  def run(theta, batch):
    with backend.use(_BACKENDS[kind]):
      return f(theta, batch)

  if kind == 'xla' or traced:  # other programs run once, sooner than they are traced
    run = tf.function(run, autograph=False, jit_compile=kind == 'xla')
  return tf.nest.map_structure(lambda t: t.numpy(), run(theta, {k: tf.constant(v) for k, v in batch.items()}))


def generate(
  config: Any, theta: dict, n_best: int, prompts: Sequence[np.ndarray] = PROMPTS, kind: str = 'cpu', first: int = 0
) -> Hypotheses:
  """Continuations of prompts, the first of which has number `first`, and of a last row without a prompt."""
  batch = generation.prompt_arrays(prompts, config, generation.width_of(config, n_best), len(prompts) + 1, first)
  run = lambda theta, batch: generation.generate(config.model(), theta, batch, config, n_best)
  return on_backend(kind, run, theta, batch, traced=getattr(config, 'scan_layers', False))


def batch_of(rows: list[list[int]], segments: np.ndarray | None = None) -> dict[str, np.ndarray]:
  labels = np.array(rows, np.int32)
  inputs = np.concatenate([np.full([len(rows), 1], BOS, np.int32), labels[:, :-1]], axis=1)
  return {'inputs': inputs, 'labels': labels, 'segments': np.ones_like(labels) if segments is None else segments}


def stacked(theta: dict, model: Any) -> dict:
  """Weights of unrolled layers as those of a model whose layers are scanned."""
  flat, values = weights.flatten(theta), {}
  for name, spec in weights.flatten(model.weights()).items():
    layers = weights.names_by_layer(name, spec.shape[0]) if spec.dims.startswith('L') else None
    values[name] = flat[name] if layers is None else tf.stack([flat[layer] for layer in layers])
  return weights.unflatten(values)


def check_packed(model: Any, theta: dict) -> tuple[dict[str, np.ndarray], np.ndarray]:
  """Two documents in a row score as each in a row of its own; returns the batch, and the scores of its row."""
  first, second = [4, 5, 6, EOS], [7, 8, EOS]
  packed = batch_of([[*first, *second, 0]], np.array([[1, 1, 1, 1, 2, 2, 2, 0]], np.int32))
  packed['inputs'][0, 4] = BOS
  together = model.token_scores(theta, packed)[0]
  np.testing.assert_allclose(together[:4], model.token_scores(theta, batch_of([first]))[0], atol=1e-4)
  np.testing.assert_allclose(together[4:7], model.token_scores(theta, batch_of([second]))[0], atol=1e-4)
  return packed, together


def check_log_probs(model: Any, theta: dict, found: Hypotheses, longest: int) -> None:
  """Continuations of PROMPTS have the log-probabilities of the full pass over prompt and continuation."""
  assert not found.lengths_BW[-1].any()  # a row without a prompt
  for row, prompt in enumerate(PROMPTS):
    for w, length in enumerate(found.lengths_BW[row]):
      ids = found.ids_BWT[row, w, :length].tolist()
      assert 1 <= length <= longest and EOS not in ids[:-1]
      log_p = model.token_scores(theta, batch_of([[*prompt[1:], *ids]]))[0, len(prompt) - 1 :]
      np.testing.assert_allclose(found.log_probs_BW[row, w], tf.reduce_sum(log_p), rtol=1e-3, atol=1e-3)


def check_alike(config: Any, theta: dict, kind: str) -> None:
  """Continuations on the CPU backend and on another one are the same."""
  ours, theirs = generate(config, theta, 2), generate(config, theta, 2, kind=kind)
  np.testing.assert_array_equal(ours.lengths_BW, theirs.lengths_BW)
  np.testing.assert_array_equal(ours.ids_BWT, theirs.ids_BWT[:, :, : ours.ids_BWT.shape[2]])
  np.testing.assert_allclose(ours.log_probs_BW[:-1], theirs.log_probs_BW[:-1], rtol=1e-4)


def check_dropout(config: Any, model: Any, with_dropout: Any, theta: dict) -> None:
  """A model drops units out only where it is given keys."""
  batch = task_of(config).random_batch()
  np.testing.assert_array_equal(with_dropout.logits(theta, batch)[0], model.logits(theta, batch)[0])
  keys = prng.fold(prng.key(0), tf.range(4))
  assert np.any(np.abs(with_dropout.logits(theta, batch, keys)[0] - model.logits(theta, batch, keys)[0]) > 0.1)
