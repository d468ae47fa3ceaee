"""Toy run, German into English, for tests to read: trained in this process until it knows its few sentences."""

import itertools
import pathlib

from lingvo_moe.config import configuration
from lingvo_moe.inputs.feed import Feed
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.tasks.task import task_of

MODEL = 'mt.cldr.Tiny'
_SUBJECTS = {
  ('Ein Hund', 'A dog is'),
  ('Eine Katze', 'A cat is'),
  ('Ein Kind', 'A child is'),
  ('Zwei Hunde', 'Two dogs are'),
  ('Zwei Katzen', 'Two cats are'),
  ('Zwei Kinder', 'Two children are'),
}
_VERBS = {
  ('läuft.', 'laufen.', 'running.'),
  ('schläft.', 'schlafen.', 'sleeping.'),
  ('wartet.', 'warten.', 'waiting.'),
  ('singt.', 'singen.', 'singing.'),
}
STEPS = 250


def sentences() -> list[tuple[str, str]]:
  """All pairs, sorted."""
  pairs = itertools.product(_SUBJECTS, _VERBS)
  return sorted((f'{s} {many if s[0] == "Z" else one}', f'{t} {english}') for (s, t), (one, many, english) in pairs)


def run_of(folder: pathlib.Path) -> RunDir:
  return RunDir(str(folder / 'runs' / 'mine'))


def write_corpus(folder: pathlib.Path) -> None:
  """Writes the corpus, a folder de-en with train and dev text."""
  (folder / 'de-en').mkdir(parents=True)
  for split, copies in (('train', 8), ('dev', 1)):
    for side, language in enumerate(('de', 'en')):
      text = ''.join(pair[side] + '\n' for pair in sentences() * copies)
      (folder / 'de-en' / f'{split}.{language}').write_text(text, encoding='utf-8')


def make(folder: pathlib.Path, steps: int = STEPS, num_experts: int = 4) -> RunDir:
  """Trains the run in folder/runs/mine."""
  write_corpus(folder / 'corpus')
  run = run_of(folder)
  config = configuration.resolve(
    MODEL,
    data_dir=str(folder / 'corpus'),
    pairs='',
    source_vocab_size=296,
    target_vocab_size=296,
    batch_tokens=512,
    max_length=32,
    encoder_layers=1,
    decoder_layers=1,
    moe_every=1,
    num_experts=num_experts,
    num_groups=4,
    model_dim=32,
    ff_dim=64,
    learning_rate=0.01,
    warmup_steps=20,
    label_smoothing=0.0,
  )
  config = run.begin(MODEL, config)
  runtime = LocalRuntime(config.program())
  runtime.init()
  batches = iter(task_of(config).train_input(run.file('cache'), Feed(quiet=True)).dataset())
  for _ in range(steps):
    metrics = runtime.train_step(next(batches))
  run.checkpoints().save(runtime)
  run.checkpoints().note_dev_loss(runtime.step, float(metrics['loss']))
  return run
