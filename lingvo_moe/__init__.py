"""Mixture-of-experts Transformers for translation, in TensorFlow, after GShard (arXiv:2006.16668)."""

from __future__ import annotations

import typing
from collections.abc import Sequence

from lingvo_moe.core import quiet

if typing.TYPE_CHECKING:  # the import of this package is quick; that of TensorFlow takes seconds
  from lingvo_moe.text.text_model import TextModel

__version__ = '0.1.0'  # setup.py reads it

quiet.install()


def load(
  path: str,
  *,
  step: int | None = None,
  checkpoint: str | None = None,
  backend: str = 'auto',
  set_threads: bool = True,
  vocab_outside: bool = False,
  split_sentences: str = 'auto',
  ensemble: Sequence[str] = (),
  imports: Sequence[str] = (),
  **decoding: typing.Any,
) -> TextModel:
  """Loads a run, or an export for the engine, for use from Python.

  A run imports TensorFlow, without its messages; an export (lingvo-moe export --format=litert) does not.

  >>> run = lingvo_moe.load('runs/mine')
  >>> run.translate(['Ein Hund läuft.', 'Zwei Hunde schlafen.'])
  ['A dog is running.', 'Two dogs are sleeping.']
  >>> [best, second] = run.translate(['Ein Hund läuft.'], n_best=2, scores=True)[0]
  >>> best.text, best.score > second.score
  ('A dog is running.', True)

  Args:
    path: log directory of the run, or folder of the export.
    step: step of the checkpoint; None: as `checkpoint` says.
    checkpoint: 'best': the one with the lowest dev loss; 'last': the newest; None: the best, or the newest where none
      was evaluated. `step` and `checkpoint` of the result say which it is.
    backend: 'auto', kernels that suit the machine; or 'reference', plain TensorFlow.
    set_threads: whether to give each of TensorFlow's kernels one core, as the job translate does; for the whole
      process, and without effect once TensorFlow has computed. An export computes with one thread without it.
    vocab_outside: whether to read vocabularies that the run names outside its log directory.
    split_sentences: whether texts are translated sentence by sentence: 'auto', which splits those of several, but where
      a tenth of the training lines had several, only those longer than 99% of these; 'always'; or 'never'.
    ensemble: further runs, or checkpoints of one, whose log-probabilities are averaged with those of the run: 'RUN',
      'RUN@STEP', 'RUN@best' or 'RUN@last', and '@STEP' for another checkpoint of the same. They share vocabularies.
    imports: files, such as 'harbour.py', or installed modules that register a model of your own; they are executed.
    **decoding: fields of the configuration to change, such as beam_size=1; for an export, threads=N.

  Raises:
    lingvo_moe.core.errors.UserError: there is no such run or checkpoint, or a value is out of its range.
  """
  from lingvo_moe.addons.engine import manifest

  if manifest.is_export(path):
    from lingvo_moe.addons.engine import exported_model

    of_runs = {'backend': None if backend == 'auto' else backend, 'vocab_outside': vocab_outside or None}
    of_runs |= {'ensemble': ensemble or None}
    threads = {} if set_threads else {'threads': 1}
    loaded = exported_model.load(path, **{**threads, 'step': step, 'checkpoint': checkpoint, **of_runs, **decoding})
  else:
    quiet.import_tensorflow()
    from lingvo_moe.config import registry
    from lingvo_moe.run import loaded as run

    registry.install(imports)

    loaded = run.load(path, step, checkpoint, backend, set_threads, vocab_outside, ensemble, decoding)
  loaded.split_sentences = split_sentences
  return loaded
