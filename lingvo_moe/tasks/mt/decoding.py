"""Decoding: translations of sentences, by the encoder and flat beam search over the decoder; scores and routing."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from lingvo_moe.core.alignment import Alignment
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.progress import Advance
from lingvo_moe.corpora import text
from lingvo_moe.inputs.mt_input import TextInput
from lingvo_moe.search import beam_search, minimum_bayes_risk
from lingvo_moe.search.continuations import Request, by_row
from lingvo_moe.search.request import BEAM, NOTHING, TranslationRequest
from lingvo_moe.search.text_constraints import TextConstraints
from lingvo_moe.tasks import inference, task
from lingvo_moe.tasks.mt.mt_config import MtConfig
from lingvo_moe.vocab import language_tags
from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab

_BATCH_TOKENS = 2048  # source tokens of a batch, unless caller or configuration sets fewer


def default_batch_tokens(config: MtConfig) -> int:
  """Source tokens of a batch: 2048, or the value of the configuration if that is less."""
  return min(config.eval_batch_tokens or config.batch_tokens, _BATCH_TOKENS)


class SentenceTranslator(task.Translator):
  """Translates, scores and routes sentences with the current weights of a runtime.

  Args:
    config: configuration of the run, with the values for decoding.
    vocabs: (source vocabulary, target vocabulary).
    runner: a runtime.
    n_best: number of hypotheses for each sentence.
    batch_tokens: source tokens of a batch; 0: default_batch_tokens(config).
  """

  able = tuple(field.name for field in dataclasses.fields(TranslationRequest) if field.name not in BEAM)
  unable = 'a log directory has it when it is loaded'

  def __init__(
    self,
    config: MtConfig,
    vocabs: tuple[TaggedVocab, TaggedVocab],
    runner: task.Runner,
    n_best: int = 1,
    batch_tokens: int = 0,
  ) -> None:
    self.n_best = n_best
    self._runner = runner
    tokens = batch_tokens or default_batch_tokens(config)
    self._config = config.for_inference(runner.row_multiple, config.max_length, tokens)
    # Several samples of a sentence take the room of as many hypotheses.
    fewer = lambda width: config.for_inference(
      runner.row_multiple, config.max_length, tokens * config.beam_size // max(width, config.beam_size)
    )
    self._vocabs = vocabs
    self.target_vocab = vocabs[1]
    program = self._config.program()
    model = program.model
    search = lambda width, config=self._config: runner.function(
      lambda weights, batch: inference.search(model, program.theta(weights), batch, config, width)
    )
    configs = {'beam': self._config, 'greedy': self._config.greedy()}
    # Traced for the arrays of their batches: those with constraints have others.
    self._searches = {(name, also): search(n_best, configs[name]) for name in configs for also in (False, True)}
    widths = {'sample': n_best, 'mbr': config.mbr_samples}
    self._samples = {name: (width, fewer(width), search(width)) for name, width in widths.items()}
    self._num_symbols = model.target_embedding.vocab_size
    self._score = runner.function(lambda weights, batch: inference.score(model, program.theta(weights), batch))
    self._attend = runner.function(lambda weights, batch: model.attention_to_source(program.theta(weights), batch))
    self._decide = runner.function(lambda weights, batch: model.decisions(program.theta(weights), batch))

  def configured(self, name: str) -> Any:
    return getattr(self._config, name)

  def check(self, request: TranslationRequest) -> None:
    super().check(request)
    if request.is_constrained and self._runner.only_rows:
      raise UserError('prefix, ban and terms are for one CPU or GPU: leave them out, or --mesh and --num_processes')

  def translate(
    self,
    sources: Sequence[str],
    target: language_tags.Languages = None,
    progress: Advance = lambda count: None,
    known: Collection[int] = (),
    keep: Callable[[int, list[task.Hypothesis]], object] = lambda sentence, hypotheses: None,
    request: TranslationRequest = NOTHING,
  ) -> task.Answers:
    """Translates sentences, batched by length; one without tokens, such as an empty line, to an empty line.

    Batches are those of all sentences, known ones too, so that the others come out as in an earlier call to the last
    bit, if batch_tokens is the same; a batch whose sentences are all known is left out.
    """
    search, sampling = self.sampling(request)
    of_beam = self._searches.get((search, request.is_constrained))
    width, config, function = self._samples.get(search, (0, self._config, of_beam))
    constrained = None
    if request.is_constrained:
      sizes = self._num_symbols, self._config.max_length, int(self._config.tags_both)
      constrained = TextConstraints(request, self.target_vocab, *sizes)
    batches = TextInput(config, self._vocabs, sources, target)
    hypotheses_of_sources = [[task.Hypothesis('', 0.0, 0.0)] for _ in sources]
    if batches.empty:
      progress(len(batches.empty))
    for index_B, batch in batches:
      new = {int(sentence): row for row, sentence in enumerate(index_B) if sentence >= 0 and sentence not in known}
      if not new:
        continue
      if constrained:
        real_B = index_B[index_B >= 0]
        batch = inference.with_constraints(batch, *constrained.of([sources[i] for i in real_B], len(index_B)))
      elif sampling:
        batch |= by_row([Request.of_text(sources[i] if i >= 0 else '', sampling) for i in index_B], width)
      hypotheses = function(batch)
      for sentence, row in new.items():
        hypotheses_of_sources[sentence] = self._read(hypotheses, row)
        if search == 'mbr':
          hypotheses_of_sources[sentence] = minimum_bayes_risk.best(hypotheses_of_sources[sentence], self.n_best)
        keep(sentence, hypotheses_of_sources[sentence])
      progress(len(new))
    answers = task.Answers(hypotheses_of_sources, batches.truncated)
    return self._aligned(sources, answers, target) if request.alignments else answers

  def too_long(self, texts: Sequence[str], target: language_tags.Languages = None) -> list[int]:
    return TextInput(self._config, self._vocabs, texts, target).truncated

  def score(
    self,
    sources: Sequence[str],
    targets: Sequence[str],
    target: language_tags.Languages = None,
    progress: Advance = lambda count: None,
  ) -> task.Scored:
    batches = TextInput(self._config, self._vocabs, sources, target, targets)
    log_probs, tokens = np.zeros(len(sources)), np.zeros(len(sources), np.int64)
    for i in batches.empty:
      log_probs[i] = 0.0 if text.is_empty(targets[i]) else -np.inf
    if batches.empty:
      progress(len(batches.empty))
    for index_B, batch in batches:
      real_B = index_B >= 0
      log_probs[index_B[real_B]] = self._score(batch)[real_B]
      tokens[index_B[real_B]] = np.sum(batch['tgt_segments'] > 0, axis=1)[real_B] - self._config.tags_both
      progress(int(np.sum(real_B)))
    return task.Scored(log_probs, tokens, batches.truncated)

  def align(
    self, sources: Sequence[str], targets: Sequence[str], target: language_tags.Languages = None
  ) -> list[Alignment]:
    """Aligns tokens by the attention of config.alignment_layer, from where a token of the target is predicted.

    A sentence over max_length is aligned in part.
    """
    alignments = [Alignment([], [], []) for _ in sources]
    around = self._config.tags_around(self._vocabs[0], target)
    for index_B, batch in TextInput(self._config, self._vocabs, sources, target, targets):
      weights_BTU = self._attend(batch)
      for row in np.flatnonzero(index_B >= 0):
        i, sides, places = index_B[row], [], []
        for side, around_side, vocab, texts in zip(('src_ids', 'tgt_labels'), around, self._vocabs, (sources, targets)):
          length = np.count_nonzero(batch[side][row]) - len(around_side.after)
          places.append(slice(len(around_side.before), length))
          sides.append(vocab.tokens(batch[side][row, places[-1]].tolist(), texts[i]))
        alignments[i] = Alignment.of_attention(*sides, weights_BTU[row, places[1], places[0]])
    return alignments

  def routing(
    self, sources: Sequence[str], translations: Sequence[str], target: language_tags.Languages = None
  ) -> list[task.SentenceRouting]:
    """Experts of each token of sentences, with the decoder reading the given translations.

    A sentence without tokens has an empty one.
    """
    routings = [task.SentenceRouting([], [], {}) for _ in sources]
    for index_B, batch in TextInput(self._config, self._vocabs, sources, target, translations):
      decided = self._decide(batch)
      for row in np.flatnonzero(index_B >= 0):
        routings[index_B[row]] = self._routing_of(batch, decided, row)
    return routings

  def _routing_of(self, batch, decided, row: int) -> task.SentenceRouting:
    source, target = (int(np.sum(batch[f'{side}_segments'][row] > 0)) for side in ('src', 'tgt'))
    layers = {}
    for name, (expert_BTR, weight_BTR) in decided.items():
      length = source if name.startswith('encoder/') else target
      layers[name] = task.LayerRouting(expert_BTR[row, :length], weight_BTR[row, :length])
    return task.SentenceRouting(
      self._vocabs[0].pieces(batch['src_ids'][row, :source]),
      self._vocabs[1].pieces(batch['tgt_inputs'][row, :target]),
      layers,
    )

  def _read(self, hypotheses: beam_search.Hypotheses, row: int) -> list[task.Hypothesis]:
    decoded = inference.decoded(hypotheses, row)
    texts = self._vocabs[1].detokenize([h.ids for h in decoded])
    return [task.Hypothesis(text, h.score, h.log_prob) for text, h in zip(texts, decoded, strict=True)]
