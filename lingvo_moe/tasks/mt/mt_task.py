"""Translation as a task of the jobs."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.quality import METRICS
from lingvo_moe.corpora import parallel
from lingvo_moe.inputs import dev_lines
from lingvo_moe.inputs.feed import Feed
from lingvo_moe.inputs.mt_input import HeldOutInput, TrainInput
from lingvo_moe.models.batches import BATCH_KEYS, zeros
from lingvo_moe.tasks import inference, run_length, task
from lingvo_moe.tasks.mt import decoding, random_batch, run_vocabs
from lingvo_moe.tasks.mt.ensemble_config import EnsembleConfig
from lingvo_moe.tasks.mt.mt_config import MtConfig
from lingvo_moe.text.sentences import TrainingLines
from lingvo_moe.vocab import language_tags
from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab

_PAIRS = 100  # language pairs by which the compiled 'eval' reports losses


class TranslationTask(task.Task):
  """Translation of sentences between languages."""

  config: MtConfig
  token_counts = ('source_tokens', 'target_tokens')
  subset = 'pair'
  exports_class = 'lingvo_moe.addons.export.translation_exports.TranslationExports'
  _dev_job: task.HeldOutJob | None = None  # its graph is traced once

  @property
  def max_length(self) -> int:
    return self.config.max_length

  @property
  def training_lines(self) -> TrainingLines:
    return TrainingLines(self.config.several_sentences, self.config.long_line)

  @functools.cached_property
  def vocabs(self) -> tuple[TaggedVocab, TaggedVocab]:
    """(source, target)."""
    return run_vocabs.load(self.config)

  def check_corpus(self) -> None:
    super().check_corpus()
    self.config.weights_of([pair.name for pair in dev_lines.trained_pairs(self.config)])
    for path in filter(None, (self.config.source_vocab, self.config.target_vocab)):
      TaggedVocab(path)

  def corpus_files(self) -> dict[str, list[str]]:
    pairs = [*dev_lines.trained_pairs(self.config), *dev_lines.find_pairs(self.config, 'dev')]
    return {f'{pair.split} of {pair.name}': [*pair.source_files, *pair.target_files] for pair in pairs}

  def prepare(self, folder: str, resumed: bool) -> MtConfig:
    if self.config.max_steps is None and not resumed:  # refuses before anything is made
      run_length.check(sum(map(parallel.count_lines, dev_lines.trained_pairs(self.config))))
    return run_vocabs.prepare(self.config, folder, resumed)

  def with_files(self, rename: Callable[[str], str]) -> MtConfig:
    paths = {name: rename(getattr(self.config, name)) for name in ('source_vocab', 'target_vocab')}
    return dataclasses.replace(self.config, **paths)

  def foreign_weights(self, other: task.Task) -> dict[str, tuple[list[int], list[int]]]:
    """The embeddings whose vocabulary is another there, and gates by task of other tasks, with the rows of both."""
    foreign, theirs = {}, other.vocabs if isinstance(other, TranslationTask) else (None, None)
    for name, our_vocab, their in zip(('source_embedding', 'target_embedding'), self.vocabs, theirs, strict=True):
      if not their or our_vocab.fingerprint != their.fingerprint:
        row_there = {piece: i for i, piece in enumerate(their.pieces(range(their.size)))} if their else {}
        rows = [
          (i, row_there[piece]) for i, piece in enumerate(our_vocab.pieces(range(our_vocab.size))) if piece in row_there
        ]
        foreign[name] = [i for i, _ in rows], [i for _, i in rows]
    if 'target_embedding' in foreign:  # of a model whose output softmax does not share it
      foreign['output_embedding'] = foreign['target_embedding']
    ours, there = ([name for name, _ in getattr(of.config, 'gate_tasks', ())] for of in (self, other))
    if ours != there:
      shared = [name for name in ours if name in there]
      gates = [name for name in self.config.program().model_specs if name.endswith('/moe/gate')]
      foreign |= dict.fromkeys(gates, tuple([*map(names.index, shared)] for names in (ours, there)))
    return foreign

  def train_input(self, cache_dir: str, feed: Feed) -> TrainInput:
    return TrainInput(self.config, self.vocabs, cache_dir, feed)

  def dev_input(self, cache_dir: str, feed: Feed) -> HeldOutInput:
    dev = HeldOutInput(self.config, self.vocabs, cache_dir, feed, self.config.eval_sentences)
    for warning in [] if feed.quiet else dev_lines.within_train(self.config, cache_dir):
      print(warning, file=sys.stderr)
    return dev

  @property
  def dev_metric(self) -> str | None:
    return METRICS[self.config.best_by].title if self.config.best_by in METRICS else None

  def dev_scores(self, runner: task.Runner, quiet: bool) -> dict[str, float]:
    if self._dev_job is None:
      greedy = TranslationTask(dataclasses.replace(self.config, beam_size=1, search='beam'))
      self._dev_job = greedy.held_out_job(runner, task.HeldOutOptions('dev', self.config.best_by_sentences))
    computed = self._dev_job.run('dev', quiet=True)
    scalars = {} if quiet else self._dev_job.finish(computed).scalars
    return {metric.title: scalars[f'{name}/mean'] for name, metric in METRICS.items() if scalars}

  def held_out_job(self, runner: task.Runner, options: task.HeldOutOptions) -> task.HeldOutJob:
    from lingvo_moe.tasks.mt import held_out

    translator = self.translator(runner, batch_tokens=options.batch_tokens)
    trained = TranslationTask(options.trained).pairs_of(()) if options.trained else []
    return held_out.job(self.config, self.vocabs[0], translator, trained, options)

  def translator(self, runner: task.Runner, n_best: int = 1, batch_tokens: int = 0) -> decoding.SentenceTranslator:
    return decoding.SentenceTranslator(self.config, self.vocabs, runner, n_best, batch_tokens)

  def ensemble(self, others: Sequence[tuple[str, task.Task]]) -> EnsembleConfig:
    for name, other in others:
      if not isinstance(other, TranslationTask):
        raise UserError(f'runs of an ensemble have one task; {name} does not translate')
      for side, ours, theirs in zip(('source', 'target'), self.vocabs, other.vocabs, strict=True):
        if ours.fingerprint != theirs.fingerprint:
          raise UserError(f'runs of an ensemble share their vocabularies; {name} has another of the {side}')
      for field in ('tag_target', 'tag_sides', 'begin'):
        if (ours := getattr(self.config, field)) != (theirs := getattr(other.config, field)):
          raise UserError(f'runs of an ensemble share {field}; saw {ours!r} in the first, and {theirs!r} in {name}')
      if other.config.gate_tasks not in ((), self.config.gate_tasks):
        raise UserError(
          f'gates by task of an ensemble have the list of tasks of its first run; {name} has another: give it first, '
          'with runs of that list or without one'
        )
    return EnsembleConfig([self.config, *(other.config for _, other in others)])

  def choose_target(self, asked: str | None, source: str | None = None) -> language_tags.Languages:
    tags = sorted(self.config.tag_ids(self.vocabs[0])) if self.config.tag_target else None
    languages = language_tags.choose_target(tags, asked, source, both=self.config.tags_both)
    return language_tags.check_pair(languages, self.gate_pairs)

  def targets(self) -> list[str]:
    tags = sorted(self.config.tag_ids(self.vocabs[0]))
    return sorted({target for _, target in self.gate_pairs}) or tags

  @property
  def gate_pairs(self) -> list[list[str]]:
    """Pairs that a gate by pair was trained with."""
    language_of = {i: language for language, i in self.config.tag_ids(self.vocabs[0]).items()}
    return [[language_of[i] for i in tags] for _, tags in self.config.gate_tasks if len(tags) == 2]

  def pairs_of(self, subsets: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of the dev loss, of the field `pairs`, and of the corpus if it is there."""
    listed = [name.strip() for name in self.config.pairs.split(',')]
    names = {*subsets, *(name for name in listed if '-' in name and not set(name) & set('*?['))}
    try:
      known_pairs = {(pair.source, pair.target) for pair in dev_lines.trained_pairs(self.config)}
    except UserError:
      known_pairs = set()
    pairs = known_pairs | set(parallel.languages_of(names - {'-'.join(pair) for pair in known_pairs}))
    return sorted(pair for pair in pairs if self.config.has_task(*pair))

  def router(
    self, runner: task.Runner
  ) -> Callable[[Sequence[str], Sequence[str], str | None], list[task.SentenceRouting]]:
    if not self.config.num_experts:
      raise UserError('a dense model routes no token: num_experts is 0')
    return self.translator(runner, batch_tokens=self.config.eval_batch_tokens or self.config.batch_tokens).routing

  def random_batch(self, seed: int = 0, full: bool = True) -> task.Batch:
    return random_batch.random_batch(self.config, seed, full)

  def batch_shapes(self, training: bool = True) -> task.Batch:
    zeros_BT = zeros(self.config.batcher(training=training).rows(self.max_length), self.max_length)
    return dict.fromkeys(BATCH_KEYS, zeros_BT)

  def inference_programs(self) -> dict[str, task.InferenceProgram]:
    batch = self.batch_shapes(training=False)
    rows = len(batch['src_ids'])
    by_pair = {**batch, 'pairs': zeros(rows, _PAIRS)}
    return inference.programs(batch, by_pair, self.config)

  def probe_search(self) -> task.InferenceProgram:
    return inference.probe(self.random_batch(full=False), self.config)
