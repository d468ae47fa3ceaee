"""Benchmark of real text in several engines: a trained run, or one widened to another size, exported to each.

A process for each engine and round translates the lines of a file, all at once and one at a time, so that its peak
memory is that of the engine (python -m benchmarks.real_text).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import engines as engines_lib
from benchmarks import widening
from benchmarks.clock import peak_rss_mib
from lingvo_moe.core.errors import UserError

ENGINES = tuple(engine for engine in engines_lib.ENGINES if engine != 'tensorflow')
SEARCHES = ('beam', 'greedy')
# Rows of a batch of CTranslate2: the default of its translate_file. The engine has the batches of its exports.
ROWS = 32
_WARMUP = 40  # lines


@dataclasses.dataclass(frozen=True)
class Job:
  """What a process translates, in JSON on its standard input."""

  texts: list[str]
  search: str  # of SEARCHES
  early_stopping: str  # of the engine's beam
  calls: int  # translations of all texts that are timed
  single: int  # texts that are translated one at a time too, from the first
  model: dict[str, Any] = dataclasses.field(default_factory=dict)  # from `export`


def export(folder: str, logdir: str, settings: Sequence[str], engines: Sequence[str]) -> dict[str, Any]:
  """Exports the best checkpoint of a run to folder/ENGINE for each engine; returns values of the model.

  settings: values of fields, 'model_dim=512'; a larger size is that of the run widened.
  """
  from lingvo_moe.addons.export import ctranslate2_model, litert_export
  from lingvo_moe.config import settings as settings_lib
  from lingvo_moe.run.rundir import RunDir
  from lingvo_moe.tasks.mt.mt_config import MtConfig
  from lingvo_moe.tasks.task import task_of

  run = RunDir(logdir)
  name, _ = run.load()
  config = run.load_config()
  if not isinstance(config, MtConfig) or config.tag_target:
    raise UserError(f'--what=text is of translation models without language tags; saw {logdir}, a run of {name}')
  step = run.checkpoints().choose(None, 'best if evaluated')
  weights = {key: stored[...] for key, stored in run.checkpoints().merged(step, config).items()}
  config = dataclasses.replace(config, scan_layers=False, lora_rank=0)
  wide = dataclasses.replace(config, **settings_lib.read(type(config), settings))
  is_wider = any(getattr(wide, field) != getattr(config, field) for field in widening.SIZES)
  if is_wider:
    widening.check(config, wide)
    weights = widening.widened(config, weights, wide)
  about = {'model': name, 'step': step, 'checkpoint': run.checkpoints().describe(step)}
  task = task_of(wide)
  with widening.positions(config.model_dim) if is_wider else contextlib.nullcontext():
    for engine in engines:
      path, (library, _, kind) = os.path.join(folder, engine), engine.rpartition('_')
      if library == 'litert':
        os.mkdir(path)
        litert_export.save(path, wide.program(), task.exports.engine_parts(), weights, about, kind)
      else:
        ctranslate2_model.require(wide)
        ctranslate2_model.save(path, wide, task.vocabs, weights, quantization=kind)
  values = {field: getattr(wide, field) for field in (*widening.SIZES, 'beam_size', 'length_norm_alpha', 'max_length')}
  return {'run': name, 'step': step, **values, 'weights': sum(array.size for array in weights.values())}


def measure(job: Job, engine: str, folder: str) -> dict[str, Any]:
  """Times one engine with the model in a folder: seconds, memory in MiB, and the translations."""
  library, _, kind = engine.rpartition('_')
  translate, count = {'litert': _litert, 'ctranslate2': _ctranslate2}[library](job, folder, kind)
  translate(job.texts[:_WARMUP])
  wall, processor = [], []
  for _ in range(job.calls):
    began, began_processor = time.perf_counter(), time.process_time()
    translations = translate(job.texts)
    wall.append(time.perf_counter() - began)
    processor.append(time.process_time() - began_processor)
  found = {'wall_s': statistics.median(wall), 'processor_s': statistics.median(processor)}
  found |= {'tokens': count(translations), 'peak_rss_mib': peak_rss_mib(), 'translations': translations}
  seconds, began_processor = [], time.process_time()
  for text in job.texts[: job.single]:
    began = time.perf_counter()
    translate([text])
    seconds.append(time.perf_counter() - began)
  if seconds:
    found['ms_of_one'] = 1e3 * statistics.median(seconds)
    found['processor_ms_of_one'] = 1e3 * (time.process_time() - began_processor) / len(seconds)
  return found


def _litert(job: Job, folder: str, kind: str) -> tuple[Callable, Callable]:
  """(function from texts to translations, function that counts their tokens)."""
  import lingvo_moe
  from lingvo_moe.search.request import TranslationRequest

  model = lingvo_moe.load(folder)
  stopping = {'early_stopping': job.early_stopping} if job.search == 'beam' else {}
  request = TranslationRequest.of(search=job.search, **stopping)
  translator = model.translator()
  translate = lambda texts: [best.text for best, *_ in translator.translate(texts, request=request).hypotheses]
  return translate, lambda lines: sum(len(ids) + 1 for ids in model.target.encode(lines))


def _ctranslate2(job: Job, folder: str, kind: str) -> tuple[Callable, Callable]:
  import ctranslate2
  import sentencepiece

  cores = len(os.sched_getaffinity(0))
  # As many workers as cores: the fastest way of CTranslate2 on a CPU; one line is computed by one of them.
  model = ctranslate2.Translator(folder, inter_threads=cores, intra_threads=1, compute_type=kind)
  source, target = (
    sentencepiece.SentencePieceProcessor(model_file=os.path.join(folder, f'{side}.model'))
    for side in ('source', 'target')
  )
  beam_size, alpha, most = (job.model[name] for name in ('beam_size', 'length_norm_alpha', 'max_length'))
  values = {'beam_size': beam_size if job.search == 'beam' else 1, 'length_penalty': alpha}
  values |= {'max_decoding_length': most, 'max_batch_size': ROWS}

  def translate(texts):
    results = model.translate_batch(source.encode(texts, out_type=str), **values)
    return target.decode_pieces([result.hypotheses[0] for result in results])

  return translate, lambda lines: sum(len(ids) + 1 for ids in target.encode(lines))


def compare(
  logdir: str,
  settings: Sequence[str],
  engines: Sequence[str],
  job: Job,
  references: Sequence[str],
  rounds: int,
  progress: Callable[[str], object] = lambda _: None,
) -> list[dict[str, Any]]:
  """Times the engines in turn, each in processes of its own.

  Returns:
    For each engine: engine, search, early_stopping, medians over the rounds (tokens_per_processor_s, wall_s,
    peak_rss_mib, ms_of_one, processor_ms_of_one), tokens_per_processor_s_of_rounds, bleu, what `export` says of the
    model, and ratio, to the tokens by processor second of the first engine.
  """
  import sacrebleu

  from benchmarks import processes

  compared = []
  with tempfile.TemporaryDirectory() as folder:
    model = export(folder, logdir, settings, engines)
    progress(f'exported: {", ".join(engines)}')
    time_engine = functools.partial(
      processes.of_engine, 'benchmarks.real_text', job=dataclasses.replace(job, model=model)
    )
    runs = {engine: functools.partial(time_engine, engine, os.path.join(folder, engine)) for engine in engines}
    of_engines = processes.alternate(runs, rounds, progress)
  for engine, of_rounds in of_engines.items():
    found = [timed for (timed,) in of_rounds]
    speeds = [round(one['tokens'] / one['processor_s'], 1) for one in found]
    names = [name for name in ('wall_s', 'peak_rss_mib', 'ms_of_one', 'processor_ms_of_one') if name in found[0]]
    medians = {name: round(statistics.median(one[name] for one in found), 3) for name in names}
    bleu = sacrebleu.corpus_bleu(found[0]['translations'], [list(references)]).score
    record = {'engine': engine, 'search': job.search, 'early_stopping': job.early_stopping, **model, **medians}
    record |= {'lines': len(job.texts), 'tokens': found[0]['tokens'], 'bleu': round(bleu, 2)}
    record |= {'tokens_per_processor_s': statistics.median(speeds), 'tokens_per_processor_s_of_rounds': speeds}
    compared.append(record)
    record['ratio'] = round(record['tokens_per_processor_s'] / compared[0]['tokens_per_processor_s'], 4)
  return compared


if __name__ == '__main__':
  engine, folder, results = sys.argv[1:]
  timed = measure(Job(**json.load(sys.stdin)), engine, folder)
  assert 'tensorflow' not in sys.modules
  with open(results.removeprefix('--json='), 'w', encoding='utf-8') as f:
    f.write(json.dumps(timed) + '\n')
