"""Translation as a task of the jobs: implements the protocol of tasks/task.py for MtConfig."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import parallel
from lingvo_moe.tasks import metrics as metrics_lib
from lingvo_moe.tasks.batch_keys import SOURCE_KEYS
from lingvo_moe.tasks.mt import dev_lines
from lingvo_moe.tasks.mt import run_vocabs
from lingvo_moe.tasks.task import DecodingSteps
from lingvo_moe.tasks.task import Feed
from lingvo_moe.tasks.task import HeldOutJob
from lingvo_moe.tasks.task import HeldOutOptions
from lingvo_moe.tasks.task import InferenceProgram
from lingvo_moe.tasks.task import Runner
from lingvo_moe.tasks.vocab import Vocab

if TYPE_CHECKING:
  from lingvo_moe.tasks.mt.config import MtConfig
  from lingvo_moe.tasks.mt.decoding import Translator
  from lingvo_moe.tasks.mt.input import HeldOutInput
  from lingvo_moe.tasks.mt.input import TrainInput
  from lingvo_moe.tasks.mt.text_search import TextSearch
  from lingvo_moe.tasks.mt.token_routing import Router

Vocabs = tuple[Vocab, Vocab]  # (source, target)
_PAIRS = 100  # language pairs by which the compiled 'eval' reports losses


class TranslationTask:
  """The methods of an MtConfig that jobs and tools use; program() is its parent's. See TaskConfig, Translates,
  Routes, HasLanguages, Measurable, AnswersText.

  Modules that import MtConfig, or are slow to import, are imported where they are used.
  """

  token_counts = ('source_tokens', 'target_tokens')
  subset = 'pair'

  def check_corpus(self: MtConfig) -> None:
    for split in ('train', 'dev'):
      pairs = dev_lines.find_pairs(self, split)
      if split == 'train':
        self.weights_of([pair.name for pair in pairs])
    for path in filter(None, (self.source_vocab, self.target_vocab)):
      Vocab(path)

  def corpus_files(self: MtConfig) -> dict[str, list[str]]:
    pairs = [pair for split in ('train', 'dev') for pair in dev_lines.find_pairs(self, split)]
    return {f'{pair.split} of {pair.name}': [*pair.source_files, *pair.target_files] for pair in pairs}

  def prepare(self: MtConfig, folder: str, begun: bool) -> MtConfig:
    return run_vocabs.prepare(self, folder, begun)

  def with_files(self: MtConfig, rename: Callable[[str], str]) -> MtConfig:
    return run_vocabs.with_files(self, rename)

  def vocabs(self: MtConfig) -> Vocabs:
    """(source, target)."""
    return run_vocabs.load(self)

  def foreign_weights(self: MtConfig, vocabs: Vocabs, other: Any) -> set[str]:
    """The embeddings whose vocabulary is another there."""
    theirs = other.vocabs() if isinstance(other, TranslationTask) else (None, None)
    embeddings = zip(('source_embedding', 'target_embedding'), vocabs, theirs, strict=True)
    return {name for name, ours, their in embeddings if their is None or ours.fingerprint != their.fingerprint}

  def shared_rows(self: MtConfig, vocabs: Vocabs, other: Any) -> dict[str, tuple[list[int], list[int]]]:
    """Rows of the embeddings whose pieces are in both vocabularies of a side."""
    if not isinstance(other, TranslationTask):
      return {}
    found = {}
    for name, ours, theirs in zip(('source_embedding', 'target_embedding'), vocabs, other.vocabs(), strict=True):
      mine, others = (vocab.pieces(range(vocab.size)) for vocab in (ours, theirs))
      row_there = {piece: i for i, piece in enumerate(others)}
      rows = [(i, row_there[piece]) for i, piece in enumerate(mine) if piece in row_there]
      found[name] = ([i for i, _ in rows], [i for _, i in rows])
    return found

  def train_input(self: MtConfig, vocabs: Vocabs, cache_dir: str, feed: Feed) -> TrainInput:
    from lingvo_moe.tasks.mt.input import TrainInput

    return TrainInput(self, vocabs, cache_dir, feed)

  def dev_input(self: MtConfig, vocabs: Vocabs, cache_dir: str, feed: Feed) -> HeldOutInput:
    from lingvo_moe.tasks.mt.input import HeldOutInput

    dev_input = HeldOutInput(self, vocabs, cache_dir, feed, self.eval_sentences)
    for warning in [] if feed.quiet else dev_lines.within_train(self, cache_dir):
      print(warning, file=sys.stderr)
    return dev_input

  def scalars(self, metrics: Mapping[str, Any]) -> dict[str, float]:
    return metrics_lib.scalars(metrics)

  def held_out_job(self: MtConfig, vocabs: Vocabs, runner: Runner, options: HeldOutOptions) -> HeldOutJob:
    """Translates every pair and scores the translations, or gives the log-probability of every target."""
    from lingvo_moe.tasks.mt import held_out

    sets = held_out.read(self, options.split, options.max_sentences, vocabs[0])
    translator = self.translator(vocabs, runner, batch_tokens=options.batch_tokens)
    warning = held_out.other_targets(sets, options.trained) if options.trained else ''
    return (held_out.ScoreJob if options.score else held_out.TranslateJob)(self, sets, translator, warning)

  def translator(self: MtConfig, vocabs: Vocabs, runner: Runner, n_best: int = 1, batch_tokens: int = 0) -> Translator:
    from lingvo_moe.tasks.mt.decoding import Translator

    if n_best > self.beam_size:
      raise UserError(
        f'a beam of {self.beam_size} has no {n_best} translations to choose from: '
        f'use --n_best={self.beam_size}, or a larger --beam_size'
      )
    sizes = {'row_multiple': runner.row_multiple, 'n_best': n_best, 'batch_tokens': batch_tokens}
    return Translator(self, vocabs, runner.function, **sizes)

  def text_function(self: MtConfig, vocabs: Vocabs) -> TextSearch:
    from lingvo_moe.tasks.mt.text_search import TextSearch

    return TextSearch(self, vocabs)

  def decoding_steps(self: MtConfig, rows: int) -> DecodingSteps:
    from lingvo_moe.tasks.mt import steps

    return steps.make(self, rows)

  def router(self: MtConfig, vocabs: Vocabs, runner: Runner) -> Router:
    from lingvo_moe.tasks.mt.token_routing import Router

    if not self.num_experts:
      raise UserError('a dense model routes no token: num_experts is 0')
    return Router(self, vocabs, runner)

  def pairs_of(self: MtConfig, subsets: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of the dev loss, of the field `pairs`, and of the corpus if it is there."""
    listed = [name.strip() for name in self.pairs.split(',')]
    names = {*subsets, *(name for name in listed if '-' in name and not set(name) & set('*?['))}
    try:
      found = {(pair.source, pair.target) for pair in parallel.find_pairs(self.data_dir, self.pairs)}
    except UserError:
      found = set()
    return sorted(found | set(parallel.languages_of(names - {'-'.join(pair) for pair in found})))

  def choose_target(self: MtConfig, vocabs: Vocabs, asked: str | None) -> str | None:
    from lingvo_moe.tasks.mt import decoding

    return decoding.choose_target(self, vocabs[0], asked)

  # What tools that compile or compare programs use; see task.Measurable.

  def random_batch(self: MtConfig, seed: int = 0, full: bool = True) -> dict[str, np.ndarray]:
    from lingvo_moe.tasks.mt import random_batch

    return random_batch.random_batch(self, seed, full)

  def batch_shapes(self: MtConfig, training: bool = True) -> dict[str, np.ndarray]:
    from lingvo_moe.tasks.mt import random_batch

    return random_batch.batch_shapes(self, training)

  def inference_programs(self: MtConfig) -> dict[str, InferenceProgram]:
    """'eval': dev loss; 'score': log-probabilities of given translations; 'encode': the encoder; 'decode': beam search."""
    from lingvo_moe.tasks.mt import decoding

    batch = self.batch_shapes(training=False)
    sources = {name: batch[name] for name in SOURCE_KEYS}
    rows = next(iter(batch.values())).shape[0]
    by_pair = {**batch, 'pairs': np.broadcast_to(np.int32(0), [rows, _PAIRS])}
    return {
      'eval': InferenceProgram(lambda model, theta, batch: model.loss(theta, batch)[1], by_pair),
      'score': InferenceProgram(lambda model, theta, batch: model.score(theta, batch), batch),
      'encode': InferenceProgram(lambda model, theta, batch: model.encode(theta, batch)[0], sources, by_rows=True),
      'decode': InferenceProgram(lambda model, theta, batch: decoding.search(model, theta, batch, self), sources),
    }

  def probe_search(self: MtConfig) -> InferenceProgram:
    """Beam search for the first sources of a random batch, with all hypotheses."""
    from lingvo_moe.tasks.mt import decoding

    batch = self.random_batch(full=False)
    rows = self.num_groups  # a multiple of the parts into which any mesh splits rows
    return InferenceProgram(
      lambda model, theta, batch: decoding.search(model, theta, batch, self, self.beam_size),
      {name: batch[name][:rows] for name in SOURCE_KEYS},
    )
