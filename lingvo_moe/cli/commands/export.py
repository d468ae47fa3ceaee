"""lingvo-moe export RUN OUT [--format=saved_model] [--languages=de,fr --keep_experts=0.5] [--keep_languages=de]

Exports a run to a folder OUT that works without this package. RUN is a log directory. The checkpoint with the lowest
dev loss is used, and printed; --step=N and --checkpoint=last select another one.

  --format=saved_model   from strings to strings, with tokenisation and beam search in the graph; needs tensorflow and
                         tensorflow_text
  --format=ctranslate2   a dense model for CTranslate2, from pieces to pieces
  --format=litert        for lingvo-moe translate, serve and lingvo_moe.load without TensorFlow; --weights=float32 keeps
                         weights as they are, and takes four times the memory of int8
  --format=huggingface   an imported model (lingvo-moe import), trained further or not, in the form that it came in; or
                         a model whose layers a class of transformers has
  --format=safetensors   the weights by the names that they have here

--keep_experts removes the experts that the pairs of --languages use least on dev text, in every MoE layer, and prints
BLEU before and after. --keep_languages takes what these languages use out of a model with gate=by_target or by_pair;
one language's is a small dense model with the same translations. --stablehlo_rows=8 adds encoder and decoding step for
8 sentences as StableHLO, for JAX alone.
docs/export.md shows how to use each.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from absl import logging

from lingvo_moe.cli import app, checkpoint_flags, machine
from lingvo_moe.cli.options import flag
from lingvo_moe.core import quiet
from lingvo_moe.core.errors import UserError
from lingvo_moe.inputs.feed import Feed
from lingvo_moe.storage import new_folder
from lingvo_moe.tasks.task import HeldOutOptions, TaskConfig, task_of

# Modules that import TensorFlow, which takes seconds, are imported by the functions: flags are checked before.
if TYPE_CHECKING:
  import numpy as np

  from lingvo_moe.run.rundir import RunDir
  from lingvo_moe.runtime.local import LocalRuntime

FORMATS = ('saved_model', 'ctranslate2', 'litert', 'huggingface', 'safetensors')
WEIGHTS = ('int8', 'float32')
WEIGHTS_ALONE = ('huggingface', 'safetensors')  # formats without a program
_USAGE = 'a run is exported to a new folder: lingvo-moe export RUN OUT'


class Options(checkpoint_flags.BestCheckpointOptions):
  """Options of the command."""

  out: str | None = flag(None, 'The folder to write, unless it is the second argument. It must not exist.')
  format: str = flag('saved_model', 'Form of the model.', one_of=FORMATS)
  weights: str | None = flag(None, 'With --format=litert: type of the matrices; default: int8.', one_of=WEIGHTS)
  languages: Sequence[str] = flag((), 'With --keep_experts: languages whose most used experts are kept; default: all.')
  keep_languages: Sequence[str] = flag(
    (), 'With gate=by_target or by_pair: languages whose experts alone are kept; those of one become dense layers.'
  )
  keep_experts: float | None = flag(None, 'Share of the experts of each MoE layer that is kept; default: all.')
  data_dir: str | None = flag(None, "With --keep_experts: folder of the corpus; default: the run's.")
  split: str = flag('test', 'With --keep_experts: held-out set whose BLEU is printed before and after.')
  max_sentences: int = flag(0, 'Lines used of it of each pair, from the first; 0: all.', lower_bound=0)
  stablehlo_rows: int = flag(
    0, 'Sentences for which encoder and decode step are added as StableHLO; 0: none.', lower_bound=0
  )

  def __post_init__(self):
    super().__post_init__()
    if self.keep_experts is not None and not 0 < self.keep_experts <= 1:
      raise UserError(f'--keep_experts is a share of the experts, above 0 and at most 1; saw {self.keep_experts:g}')
    if self.languages and self.keep_experts is None:
      raise UserError(
        '--languages are those for which experts are kept: add --keep_experts, such as --keep_experts=0.5'
      )
    if self.keep_experts is None and (self.data_dir or self.max_sentences or self.split != 'test'):
      raise UserError(
        '--data_dir, --split and --max_sentences say on what text experts are chosen: add --keep_experts, such as '
        '--keep_experts=0.5, or leave them out'
      )
    if self.keep_languages and (self.keep_experts is not None or self.format not in ('saved_model', 'litert')):
      raise UserError(
        '--keep_languages is for --format=saved_model and --format=litert, without --keep_experts; saw '
        f'--format={self.format}: leave one of them out'
      )
    if self.keep_experts is not None and self.format in WEIGHTS_ALONE:
      raise UserError(f'--keep_experts is not for --format={self.format}: leave one of them out')
    if self.weights and self.format != 'litert':
      raise UserError(f'--weights is for --format=litert; saw --format={self.format}: leave one of them out')
    if self.format != 'saved_model' and self.stablehlo_rows:
      raise UserError('--stablehlo_rows is for --format=saved_model: leave one of them out')


@app.command(Options, tensorflow=False, takes=('logdir', 'out'), usage=_USAGE)
def main(options: Options) -> None:
  export(options)


def export(options: Options) -> None:
  """Exports a run, and says what was written."""
  new_folder.check(options.out, 'an export')
  if options.stablehlo_rows:
    os.environ['JAX_PLATFORMS'] = 'cpu'  # read when JAX is first imported; no step is run on this machine
  quiet.import_tensorflow()
  logging.set_verbosity(logging.WARNING)  # TensorFlow notes each file of a SavedModel at INFO
  machine.set_threads(machine.LOCAL, decoding=True)
  run = options.run
  config = options.load_config(run)
  _check(run, config, options)
  step = options.choose_step(run)
  print(f'using the checkpoint of {run.checkpoints().describe(step)}')
  weights = run.checkpoints().merged(step, config)
  if options.format not in WEIGHTS_ALONE:  # these are read a tensor at a time: a model may be larger than memory
    weights = {name: stored[...] for name, stored in weights.items()}
  model = ModelToExport(dataclasses.replace(config, scan_layers=False, lora_rank=0), step, weights)
  if options.keep_experts is not None:
    model = _prune(model, options)
  if options.keep_languages:
    model = _of_languages(model, options.keep_languages)
  from lingvo_moe.addons.export import model_card

  with new_folder.writing(options.out) as folder:
    _save(folder, run, model, options)
    model_card.write(folder, run, step, model.config)
  size = sum(path.stat().st_size for path in pathlib.Path(options.out).rglob('*') if path.is_file())
  print(f'{options.out}: {options.format} of {run.load()[0]}, {size / 1e6:.1f} MB')


class ModelToExport(NamedTuple):
  """A model to be exported."""

  config: TaskConfig
  step: int
  weights: Mapping[str, np.ndarray]  # by flat name

  def runtime(self) -> LocalRuntime:
    import numpy as np

    from lingvo_moe.runtime.local import LocalRuntime

    runtime = LocalRuntime(self.config.program())
    runtime.load({'step': np.asarray(self.step), 'weights': self.weights})
    return runtime


def _check(run: RunDir, config: TaskConfig, options: Options) -> None:
  """Raises UserError where the run cannot be exported so, before any work."""
  if options.format == 'huggingface':
    from lingvo_moe.addons.interop import hub_export

    hub_export.require(run)
  of_any_text = options.format in WEIGHTS_ALONE or (options.format == 'litert' and options.keep_experts is None)
  if not of_any_text and not task_of(config).exports.is_of_text:
    raise UserError(
      f'models of translation are exported so; {run.path} holds a run of {run.load()[0]}: --format=litert takes '
      'Transformers over text too, --format=safetensors the weights of any model'
    )
  if options.keep_experts is not None:
    config.with_share_of_experts(options.keep_experts)
  if options.format == 'ctranslate2':
    from lingvo_moe.addons.export import ctranslate2_model

    ctranslate2_model.require(config)
  if options.keep_languages and not (config.num_experts and config.moe_gate.tasks):
    raise UserError(
      '--keep_languages is for a model with gate=by_target or by_pair, by whose languages experts are known; saw '
      f'gate={config.gate!r} with num_experts={config.num_experts}: use --keep_experts and --languages'
    )
  if options.format == 'litert' and not options.keep_languages:
    task_of(config).exports.engine_parts()
  if options.stablehlo_rows:
    from lingvo_moe.runtime import lowering  # noqa: F401  # needs an extra, and says which


def _save(folder: str, run: RunDir, model: ModelToExport, options: Options) -> None:
  task = task_of(model.config)
  if options.format in WEIGHTS_ALONE:
    from lingvo_moe.addons.interop import hub_export

    save = hub_export.save_hub_folder if options.format == 'huggingface' else hub_export.save_weights
    return save(folder, run, model.step)
  if options.format == 'ctranslate2':
    from lingvo_moe.addons.export import ctranslate2_model

    return ctranslate2_model.save(folder, model.config, task.vocabs, model.weights)
  if options.format == 'litert':
    from lingvo_moe.addons.export import litert_export

    checkpoint = run.checkpoints().describe(model.step)
    about = {'model': run.load()[0], 'step': model.step, 'checkpoint': checkpoint}
    return litert_export.save(
      folder, model.config.program(), task.exports.engine_parts(), model.weights, about, options.weights or 'int8'
    )
  from lingvo_moe.addons.export import saved_model

  about = {'model': run.load()[0], 'step': model.step}
  fields = 'beam_size', 'length_norm_alpha', 'max_length', 'num_experts'
  about |= {name: getattr(model.config, name) for name in fields}
  about |= {'languages': [name for name, _ in model.config.gate_tasks]} if model.config.gate_tasks else {}
  saved_model.save(folder, task.exports.text_function(), model.weights, about)
  if options.stablehlo_rows:
    from lingvo_moe.addons.export import stablehlo

    stablehlo.save(
      os.path.join(folder, 'stablehlo'), task.exports.decoding_steps(options.stablehlo_rows), model.weights
    )


def _prune(model: ModelToExport, options: Options) -> ModelToExport:
  """The model without the experts that are used least; prints which share of choices that leaves, and BLEU."""
  from lingvo_moe.addons.export import pruning
  from lingvo_moe.run import reporting

  config = model.config
  if options.data_dir:
    config = dataclasses.replace(config, data_dir=options.data_dir)
  task = task_of(config)
  if not (known := task.pairs_of([])):
    task.check_corpus()  # says what is missing
  pairs = pruning.choose_pairs(known, options.languages)
  config = dataclasses.replace(config, pairs=','.join('-'.join(pair) for pair in pairs))
  smaller = config.with_share_of_experts(options.keep_experts)
  count, all_experts = smaller.num_experts, config.num_experts

  runtime = model._replace(config=config).runtime()
  before = _bleu(config, runtime, options, f'{all_experts} experts')
  task = task_of(config)
  with tempfile.TemporaryDirectory() as cache_dir:
    choices = reporting.evaluate(task, runtime, task.dev_input(cache_dir, Feed(quiet=True))).choices
  chosen = pruning.choose_experts(choices, count)
  for layer, experts in chosen.items():
    print(f'{layer}: {count} of {all_experts} experts, which have {experts.share:.1%} of the choices on dev')
  pruned = ModelToExport(
    smaller, model.step, pruning.without_others(model.weights, config.program().weight_specs, chosen)
  )
  after = _bleu(smaller, pruned.runtime(), options, f'{count} experts')
  width = max(map(len, before))
  print(f'BLEU on {options.split}, {all_experts} experts -> {count}')
  for name, bleu in before.items():
    print(f'{name:{width}}  {bleu:5.1f} -> {after[name]:5.1f}')
  return pruned


def _of_languages(model: ModelToExport, languages: Sequence[str]) -> ModelToExport:
  """The model without the experts that other languages use; prints which are kept. One language's is dense."""
  from lingvo_moe.addons.export import pruning
  from lingvo_moe.core import weights as weights_lib
  from lingvo_moe.layers.ffn import ACTIVATIONS

  config, specs = model.config, model.config.program().weight_specs
  tasks = pruning.choose_tasks([name for name, _ in config.gate_tasks], config.gate == 'by_pair', languages)
  choices = pruning.choices_of_tasks(model.weights, config.moe_gate, tasks)
  gate_tasks = tuple(config.gate_tasks[i] for i in tasks)
  if len(tasks) == 1 and config.expert in ACTIVATIONS:
    count = config.choices + config.shared_experts
    smaller = dataclasses.replace(config, num_experts=0, joined_experts=count, gate_tasks=gate_tasks)
    weights = pruning.joined(model.weights, choices, config.expert_output_scale)
  else:
    kept = pruning.experts_of_tasks(choices, config.num_experts)
    count = len(next(iter(kept.values())).experts)
    smaller = config.with_experts(count, gate_tasks=gate_tasks)
    weights = pruning.without_others(model.weights, specs, kept)
    weights = {name: w[tasks] if name.endswith('/moe/gate') else w for name, w in weights.items()}
  for layer, of_layer in choices.items():
    experts = ', '.join(map(str, sorted({*of_layer.experts_PR.flat})))
    print(f'{layer}: experts {experts} of {config.num_experts}')
  counts = [weights_lib.count(of_model.program().model_specs) for of_model in (config, smaller)]
  print(f'{", ".join(name for name, _ in smaller.gate_tasks)}: {counts[1]:,} of {counts[0]:,} weights')
  return ModelToExport(smaller, model.step, weights)


def _bleu(config: TaskConfig, runtime: LocalRuntime, options: Options, label: str) -> dict[str, float]:
  """BLEU of each pair, and their mean, on the held-out set."""
  job = task_of(config).held_out_job(runtime, HeldOutOptions(options.split, options.max_sentences))
  scalars = job.finish(job.run(label)).scalars
  return {name.partition('/')[2]: score for name, score in scalars.items() if name.startswith('bleu/')}


if __name__ == '__main__':
  main()
