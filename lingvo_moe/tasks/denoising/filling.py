"""Filling in spans: the encoder over a text with sentinels, and flat beam search for what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tensorflow as tf

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.weights import Theta
from lingvo_moe.search import beam_search
from lingvo_moe.tasks import encoder_decoder_search
from lingvo_moe.tasks.denoising.input import source_arrays
from lingvo_moe.tasks.denoising.vocab import SentinelVocab
from lingvo_moe.tasks.encoder_decoder import EncoderDecoder
from lingvo_moe.tasks.plain_text import escapes
from lingvo_moe.tasks.plain_text.inference import at_inference
from lingvo_moe.tasks.task import Runner
from lingvo_moe.tasks.vocab import EOS

if TYPE_CHECKING:
  from lingvo_moe.tasks.denoising.config import DenoisingConfig

_ROWS = 16  # sources of a batch
_ROUND = 16  # lengths of padded sources are multiples of it, so that few shapes are compiled


class Filled(NamedTuple):
  """A text filled in, one hypothesis."""

  text: str
  log_prob: float  # natural log, summed over the symbols of the answer and the end
  score: float  # log_prob over the length penalty, by which hypotheses are ranked
  ids: tuple[int, ...] = ()  # of the answer


class FilledLines(NamedTuple):
  """Some lines filled in."""

  hypotheses: list[list[Filled]]  # of each line in the order given, best first
  truncated: list[int]  # lines over the length limit, of which only the beginning was read


def search(
  model: EncoderDecoder, theta: Theta, batch: Mapping[str, tf.Tensor], config: DenoisingConfig, n_best: int = 1
) -> beam_search.Hypotheses:
  """Beam search for what sentinels stand for; answers are as long as the targets of training at most."""
  most = config.lengths.targets
  return encoder_decoder_search.search(
    model,
    theta,
    batch,
    max_lengths=lambda segments_BT: tf.where(tf.reduce_any(segments_BT > 0, axis=1), most, 0),
    most=most,
    beam_size=config.beam_size,
    length_norm_alpha=config.length_norm_alpha,
    n_best=n_best,
  )


class Filler:
  """Fills in spans with the current weights of a runtime.

  Args:
    config: configuration of the run.
    vocab: its vocabulary.
    runner: a runtime.
    n_best: hypotheses of each text.
  """

  def __init__(self, config: DenoisingConfig, vocab: SentinelVocab, runner: Runner, n_best: int = 1):
    if n_best > config.beam_size:
      raise UserError(
        f'a beam of {config.beam_size} has no {n_best} answers to choose from: use --n_best={config.beam_size}, or a '
        'larger --beam_size'
      )
    self._config = at_inference(config, runner, config.inputs_length)
    self._vocab = vocab
    self._rows = -(-_ROWS // runner.row_multiple) * runner.row_multiple
    program = self._config.program()
    self._search = runner.function(
      lambda weights, batch: search(program.model, program.theta(weights), batch, self._config, n_best)
    )

  def translate(
    self, lines: Sequence[str], target: str | None = None, progress: Callable[[int], object] | None = None
  ) -> FilledLines:
    """Lines filled in, in which a line break is written as a backslash and an n, and so it is in the results."""
    found = self.translate_texts([escapes.unescaped(line) for line in lines], target, progress)
    shown = [[filled._replace(text=escapes.escaped(filled.text)) for filled in of_line] for of_line in found.hypotheses]
    return FilledLines(shown, found.truncated)

  def translate_texts(
    self, texts: Sequence[str], target: str | None = None, progress: Callable[[int], object] | None = None
  ) -> FilledLines:
    """Texts with their sentinels filled in; one without any stays as it is."""
    del target
    ids = [self._vocab.encode(text) for text in texts]
    found = [[Filled(text, 0.0, 0.0)] for text in texts]
    wanted = [i for i, row in enumerate(ids) if any(map(self._vocab.is_sentinel, row))]
    room = self._config.inputs_length - 1
    for line, of_line in zip(wanted, self.fill([ids[i][:room] for i in wanted], progress), strict=True):
      found[line] = of_line
    if progress is not None:
      progress(len(texts) - len(wanted))
    return FilledLines(found, [i for i in wanted if len(ids[i]) > room])

  def fill(self, sources: Sequence[np.ndarray], progress: Callable[[int], object] | None = None) -> list[list[Filled]]:
    """Sources, ids without the end, filled in."""
    found = []
    for begin in range(0, len(sources), self._rows):
      part = [np.append(source, EOS) for source in sources[begin : begin + self._rows]]
      rows = self._rows if len(sources) > 1 else self._config.num_groups
      length = -(-max(map(len, part)) // _ROUND) * _ROUND
      hypotheses = self._search(source_arrays(part, rows, length))
      found += [self._read(hypotheses, row, source) for row, source in enumerate(part)]
      if progress is not None:
        progress(len(part))
    return found

  def _read(self, hypotheses: beam_search.Hypotheses, row: int, source: np.ndarray) -> list[Filled]:
    found = []
    for w, length in enumerate(hypotheses.lengths_BW[row].tolist()):
      if length:
        ids = hypotheses.ids_BWT[row, w, :length].tolist()
        log_prob, score = float(hypotheses.log_probs_BW[row, w]), float(hypotheses.scores_BW[row, w])
        found.append(Filled(self._vocab.fill(source, ids), log_prob, score, tuple(ids)))
    if not found:
      raise UserError('a text has no answer of finite probability: weights must be finite; use an earlier step')
    return found
