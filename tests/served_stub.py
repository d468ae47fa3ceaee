"""Stub of a translation model that is served, for tests of the server."""

import threading
from typing import NamedTuple

from lingvo_moe.core.alignment import Alignment, Token
from lingvo_moe.core.errors import UserError, closest
from lingvo_moe.text.sentences import Plan
from lingvo_moe.text.translator import Answers


class Hypothesis(NamedTuple):
  text: str
  score: float = 0.0
  log_prob: float = 0.0
  alignment: Alignment | None = None


class Stub:
  """A run that reverses lines; lines of more than 10 letters are truncated."""

  model, checkpoint = 'toy.Stub', 'step 3, the newest'
  over_the_length = 'over max_length=10 tokens'
  beam_size = 3
  continues_text, able = False, ('alignments', 'ban', 'terms', 'search', 'top_k', 'placeholders')

  def __init__(self, pairs=(('de', 'en'), ('fr', 'en')), tags=()):
    self._pairs, self._tags = list(pairs), list(tags)
    self.go, self.batches = threading.Event(), []
    self.go.set()

  def pairs(self):
    return self._pairs

  def targets(self):
    return self._tags

  def aligned(self, line, hypothesis):
    tokens = lambda text: [Token(c, i, i + 1) for i, c in enumerate(text)]
    source, target = tokens(line[:10]), tokens(hypothesis.text)
    return hypothesis._replace(
      alignment=Alignment(source, target, [(len(source) - 1 - i, i) for i in range(len(source))])
    )

  def choose_target(self, requested, source=None):
    if not self._tags:
      return None
    if requested not in self._tags:
      raise UserError(f'no {requested}; {closest(str(requested), self._tags)}')
    return requested

  def translator(self, n_best):
    return self

  def check(self, request):
    if not set(request.asked) <= set(self.able):
      raise UserError(f'{request.asked} cannot be asked here')

  def plan(self, lines, asked):
    return Plan.of_whole(lines)

  def answer_parts(self, lines, asked):
    target, n_best, _, request = asked
    self.batches.append((lines, target, n_best))
    self.asked = request
    if 'longest' in request.ban:
      raise UserError('constraints leave no room')
    assert self.go.wait(30)
    if 'bad' in lines:
      raise RuntimeError('secret')
    texts = [line[:10][::-1] + (f'>{target}' if target else '') for line in lines]
    hypotheses = [[Hypothesis(t + "'" * rank) for rank in range(n_best)] if t else [Hypothesis('')] for t in texts]
    if request.alignments:
      hypotheses = [[self.aligned(line, h) for h in found] for line, found in zip(lines, hypotheses)]
    return Answers(hypotheses, [i for i, line in enumerate(lines) if len(line) > 10])
