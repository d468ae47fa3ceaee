"""Text from plain text: texts are decoded in batches of rows, and lines have their line breaks written as escapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lingvo_moe.search.beam_search import Hypotheses
from lingvo_moe.tasks import inference, task
from lingvo_moe.tasks.inference import Decoded

_ROWS = 16  # texts of a batch


class TextGenerator(task.Translator):
  """Base of what continues texts, or fills them in, with the current weights of a runtime.

  Args:
    config: configuration of the run.
    vocab: its vocabulary.
    runner: a runtime.
    search: function(model, theta, batch, config).
  """

  def __init__(self, config: Any, vocab: Any, runner: task.Runner, search: Callable[..., Hypotheses]):
    self._config = config = config.for_inference(runner.row_multiple, config.row_length)
    self._vocab = vocab
    self._groups = runner.row_multiple
    self._lines = 0
    program = config.program()
    self._search = runner.function(lambda weights, batch: search(program.model, program.theta(weights), batch, config))

  def _batch(self, texts: Sequence[np.ndarray], rows: int, first: int) -> task.Batch:
    """Batch of so many rows of some texts, as ids, of which `first` is the number of the first."""
    raise NotImplementedError

  def decode(self, texts: Sequence[np.ndarray], first: int = 0) -> Iterator[list[Decoded]]:
    """Hypotheses of each text, given as ids."""
    rows = -(-_ROWS // self._groups) * self._groups if len(texts) > 1 else self._groups
    for start in range(0, len(texts), rows):
      part = texts[start : start + rows]
      hypotheses = self._search(self._batch(part, rows, first + start))
      yield from (inference.decoded(hypotheses, row) for row in range(len(part)))

  def translate(self, texts: Sequence[str], target: str | None = None, first: int = 0) -> task.Answers:
    """Answers texts, of which `first` is the number of the first."""
    raise NotImplementedError

  def translate_lines(self, lines: Sequence[str], target: str | None = None) -> task.Answers:
    """Answers lines, in which a line break is written as a backslash and an n, and so it is in the results."""
    answers = self.translate([_unescaped(line) for line in lines], target, self._lines)
    self._lines += len(lines)
    shown = [[h._replace(text=_escaped(h.text)) for h in of_line] for of_line in answers.hypotheses]
    return task.Answers(shown, answers.truncated)


def _escaped(text: str) -> str:
  r"""A text on one line: 'a<line break>b' is a\nb."""
  return text.replace('\\', '\\\\').replace('\n', '\\n').replace('\r', '\\r')


def _unescaped(line: str) -> str:
  """The text of a line that `_escaped` made. A backslash before another character stands for itself."""
  return '\\'.join(part.replace('\\n', '\n').replace('\\r', '\r') for part in line.split('\\\\'))
