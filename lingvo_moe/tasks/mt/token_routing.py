"""Routing of text: the experts that every MoE layer chooses for each token of a sentence and of its translation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lingvo_moe.tasks import task
from lingvo_moe.tasks.batch_keys import SOURCE_KEYS
from lingvo_moe.tasks.mt.config import MtConfig
from lingvo_moe.tasks.mt.input import TextInput
from lingvo_moe.tasks.vocab import Vocab


class Router:
  """Routes sentences and translations with the current weights of a runtime.

  Args:
    config: configuration of the run.
    vocabs: (source vocabulary, target vocabulary).
    runner: a runtime.
  """

  def __init__(self, config: MtConfig, vocabs: tuple[Vocab, Vocab], runner: task.Runner) -> None:
    self._config = config.for_inference(runner.row_multiple, config.max_length)
    self._vocabs = vocabs
    program = self._config.program()
    model = program.model
    self._decide = runner.function(lambda weights, batch: model.decisions(program.theta(weights), batch))

  def routing(
    self, sources: Sequence[str], translations: Sequence[str], target_language: str | None = None
  ) -> list[task.SentenceRouting]:
    """Routing of each sentence, with the decoder reading the given translation; empty for a sentence without tokens."""
    inputs = TextInput(
      self._config,
      self._vocabs[0],
      sources,
      target_language=target_language,
      targets=translations,
      target_vocab=self._vocabs[1],
    )
    found = [task.SentenceRouting([], [], {}) for _ in sources]
    for index_B, batch in inputs:
      decided = self._decide(batch)
      for row in np.flatnonzero(index_B >= 0):
        found[index_B[row]] = self._read(batch, decided, row)
    return found

  def _read(self, batch, decided, row) -> task.SentenceRouting:
    lengths = {side: int(np.sum(batch[f'{side}_segments'][row] > 0)) for side in ('src', 'tgt')}
    source_ids, _, _ = (batch[key][row] for key in SOURCE_KEYS)
    layers = {}
    for name, (expert_BTR, weight_BTR) in decided.items():
      length = lengths['src' if name.startswith('encoder/') else 'tgt']
      layers[name] = task.LayerRouting(expert_BTR[row, :length], weight_BTR[row, :length])
    return task.SentenceRouting(
      self._vocabs[0].pieces(source_ids[: lengths['src']]),
      self._vocabs[1].pieces(batch['tgt_inputs'][row, : lengths['tgt']]),
      layers,
    )
