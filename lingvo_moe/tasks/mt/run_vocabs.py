"""The vocabularies of a run: named, made or found, copied into the run's folder, and loaded from it."""

import dataclasses
import itertools
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_moe.config import fields
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import parallel, text
from lingvo_moe.inputs import dev_lines
from lingvo_moe.inputs.data_config import DataConfig
from lingvo_moe.storage import files, json_files
from lingvo_moe.storage.files import lock
from lingvo_moe.tasks.mt import unwritten_text
from lingvo_moe.tasks.mt.mt_config import MtConfig
from lingvo_moe.text.sentences import TrainingLines
from lingvo_moe.vocab import language_tags, vocab_training
from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab, check_size, own_copy

# Settings that train_vocab has under the same names.
_OF_TRAINING = ('temperature', 'max_sentences', 'character_coverage', 'tag_sides', 'seed')
_MEASURED_LINES = 10_000


def prepare(config: MtConfig, folder: str, resumed: bool) -> MtConfig:
  """Settles vocabularies and tags of a run; the configuration that is returned names the run's own vocabularies.

  A new vocabulary has as many pieces as were asked for, or as many as the corpus gives; one that is given has as many
  as it has, and its own rule of normalisation.

  Args:
    config: its source_vocab and target_vocab may be empty.
    folder: where the run keeps its vocabularies.
    resumed: whether the run goes on; then its vocabularies cannot change.
  """
  if config.tag_target is None:  # decoder and translate could not tell without the training corpus
    targets = {pair.target for pair in dev_lines.trained_pairs(config)}
    config = dataclasses.replace(config, tag_target=config.tags(targets))
  tasks = _task_languages(config)
  if len(tasks) > 1 and not config.tag_target:
    names = ', '.join(map('-'.join, tasks))
    fields.refuse(config, 'tag_target', f'True with gate={config.gate!r}', f'only tags tell {names} apart: set it')
  if config.several_sentences is None or config.long_line is None:
    several, long = _training_lines(config)
    config = dataclasses.replace(config, several_sentences=several, long_line=long)
  given = _given(config)
  if resumed:  # one that was not made for the run was given to it
    given = {side: path or ('' if _settings(folder, side) else _own(folder, side)) for side, path in given.items()}
  vocabs = {side: TaggedVocab(path or _ensure(config, side, folder)) for side, path in given.items()}
  if config.tag_target and not resumed:  # refuses a language without a tag before anything is written
    for pair in dev_lines.trained_pairs(config):
      languages = language_tags.of_pair(True, config.tag_sides, pair.source, pair.target)
      config.tags_around(next(iter(vocabs.values())), languages)
  tag_id = next(iter(vocabs.values())).tag_id
  tags_of = lambda task: tuple(tag_id(language) for language in task if config.tag_target)
  changes, copies = {'gate_tasks': tuple(('-'.join(task), tags_of(task)) for task in tasks)}, []
  if len(tasks) == 1 and not resumed:
    print(
      f'gate={config.gate!r} sees one task, {"-".join(tasks[0])}: it uses {config.choices} of '
      f'{config.num_experts} experts in each MoE layer',
      file=sys.stderr,
    )
  for side, vocab in vocabs.items():
    if given[side] and not resumed and side != 'source':
      unwritten_text.warn(vocab, dev_lines.trained_pairs(config))
    rules = [f'{s}_normalization' for s in (('source', 'target') if side == 'shared' else (side,))]
    for name, value in {**dict.fromkeys(rules, vocab.normalization), f'{_field(side)}_size': vocab.size}.items():
      changes[name], asked = value, getattr(config, name)
      if asked not in (None, value) and (given[side] or name in rules):
        print(f'{name}={value}, as {vocab.path} has; the configuration has {asked}', file=sys.stderr)
      elif asked not in (None, value):
        chosen = f'{name}={value} is chosen for the corpus'
        less = f'{name}={asked} is more than the corpus gives; this run has {value}'
        print(chosen if config.vocab_by_corpus else less, file=sys.stderr)
    copies.append(own_copy(vocab.path, _own(folder, side), resumed, TaggedVocab, _field(side)))
  return dataclasses.replace(config, source_vocab=copies[0], target_vocab=copies[-1], **changes)


def _task_languages(config: DataConfig) -> list[tuple[str, ...]]:
  """Languages of each task of a gate by task, sorted: (target,) or (source, target)."""
  if not (getattr(config, 'num_experts', 0) and config.moe_gate.tasks):  # a DataConfig has no model
    return []
  first = 1 if config.gate == 'by_target' else 0
  return sorted({(pair.source, pair.target)[first:] for pair in dev_lines.trained_pairs(config)})


def _training_lines(config: DataConfig) -> TrainingLines:
  """The first source lines of every pair, as many of each."""
  pairs = dev_lines.trained_pairs(config)
  each = -(-_MEASURED_LINES // len(pairs))
  lines = ((pair.source, line) for pair in pairs for line in itertools.islice(text.lines(pair.source_files), each))
  return TrainingLines.of(lines)


def load(config: DataConfig) -> tuple[TaggedVocab, TaggedVocab]:
  """The source and target vocabularies, which must have as many pieces as the model has embeddings.

  Symbols such as `<2de>` are text in a model without tags, as another implementation of an imported one has them.
  """
  for name in ('source_vocab', 'target_vocab'):
    if not getattr(config, name):
      raise UserError(f'{name} must name a SentencePiece .model file; saw none: make one with lingvo-moe vocab')
  begins = '2' * (config.tag_target is not False) + '@' * any(corpus.tag for corpus in config.mixture)
  source = TaggedVocab(config.source_vocab, begins)
  target = source if config.target_vocab == config.source_vocab else TaggedVocab(config.target_vocab, begins)
  target_size = config.source_vocab_size if config.shared_vocab else config.target_vocab_size
  check_size(source, 'source_vocab_size', config.source_vocab_size, config.source_vocab)
  check_size(target, 'target_vocab_size', target_size, config.target_vocab)
  return source, target


def _field(side: str) -> str:
  """Field that names the vocabulary of a side; a shared one has that of the source."""
  return 'target_vocab' if side == 'target' else 'source_vocab'


def _own(folder: str, side: str) -> str:
  """Path of the run's own copy."""
  return os.path.join(folder, _field(side).removesuffix('_vocab') + '.model')


def _given(config: DataConfig) -> dict[str, str]:
  """The vocabularies that a configuration names, by side: of 'source' and 'target', or of 'shared'; '' for none.

  Those of an imported model may share their ids, and differ in what they encode each side's text to.
  """
  named = {'source': config.source_vocab, 'target': config.target_vocab}
  different = len({*filter(None, named.values())}) > 1
  return {'shared': named['source'] or named['target']} if config.shared_vocab and not different else named


def _ensure(config: DataConfig, side: str, vocab_dir: str) -> str:
  """Path of a vocabulary, trained where it is not there; the next call finds it.

  Of several processes that share the folder, one trains it while the others wait; processes that do not share it train
  equal ones.

  Raises:
    UserError: a vocabulary in the folder was made with other settings.
  """
  output = os.path.join(vocab_dir, side)
  settings = {
    'pairs': config.pairs,
    'vocab_size': getattr(config, f'{_field(side)}_size'),
    'temperature': config.temperature,
    'weights': [list(weight) for weight in config.weights],
    'max_sentences': config.vocab_sentences,
    'character_coverage': config.character_coverage,
    'tag_target': config.tag_target,
    'tag_sides': config.tag_sides,
    'seed': config.seed,
    'vocab_by_corpus': config.vocab_by_corpus,
    'corpus_tags': sorted({c.tag for c in config.mixture if c.tag}) if side != 'target' else [],
  }
  with lock(vocab_dir):
    made = _settings(vocab_dir, side)
    if made is not None and _is_whole(output + '.model', made):
      made = {**made, 'normalization': TaggedVocab(output + '.model').normalization}
      for name, value in {**settings, 'normalization': config.normalization(side) or made['normalization']}.items():
        if made.get(name) not in (None, value):  # an earlier version kept fewer settings, or left one open
          raise UserError(
            f'a vocabulary keeps the settings it was made with; {output}.model has {name}={made.get(name)!r}, now '
            f'{name}={value!r}: set it back, or start in another folder'
          )
      return output + '.model'
    if made is None and os.path.exists(output + '.model'):  # a user's, or of a trainer that was killed here
      aside = files.set_aside(output + '.model')
      print(f'{output}.model was not made for this run; it is kept as {aside}', file=sys.stderr)
    pairs = dev_lines.trained_pairs(config)
    asked = settings['vocab_size']
    vocab_training.train_vocab(
      pairs,
      output,
      min(asked, _pieces_of(pairs)) if config.vocab_by_corpus else asked,
      **{name: settings[name] for name in _OF_TRAINING},
      side=side,
      weights=config.weights_of([pair.name for pair in pairs]),
      tags=config.tags({pair.target for pair in pairs}) and side != 'target',
      corpus_tags=settings['corpus_tags'],
      normalization=config.normalization(side),
      overwrite=True,
      exact_size=False,
    )
    if side != 'source':
      unwritten_text.warn(TaggedVocab(output + '.model'), pairs)
    made = {**settings, 'fingerprint': files.sha256(output + '.model')}
    files.write(output + '.json', json_files.dump(made, indent=2))
  return output + '.model'


def _pieces_of(pairs: Sequence[parallel.Pair]) -> int:
  """Pieces that suit a corpus: bytes, symbols and the characters of its first lines, and 25 * sqrt(lines) more."""
  first = (itertools.islice(text.lines(files), _MEASURED_LINES) for pair in pairs for _, files in pair.sides)
  characters = set().union(*itertools.chain.from_iterable(first))
  return 300 + len(characters) + round(25 * math.sqrt(sum(map(parallel.count_lines, pairs))))


def _settings(folder: str, side: str) -> dict[str, Any] | None:
  """Settings that a vocabulary was made with; None where they are missing or, with a line, damaged."""
  path = os.path.join(folder, side + '.json')
  try:
    return {'weights': [], 'corpus_tags': [], **json_files.read(path, 'the settings of a vocabulary', 'it is not used')}
  except FileNotFoundError:
    pass
  except UserError as e:
    print(e, file=sys.stderr)
  return None


def _is_whole(model: str, made: Mapping[str, Any]) -> bool:
  """Whether the file of a vocabulary is as it was made."""
  if not os.path.exists(model):
    return False
  if made.get('fingerprint') in (None, files.sha256(model)):  # an earlier version kept none
    return True
  print(f'{model} is not as it was made; it is made again', file=sys.stderr)
  return False
