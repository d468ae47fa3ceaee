"""Benchmark of beam search in other engines than TensorFlow: the same model and random sources, exported to each.

`export` writes the model, and a process that imports no TensorFlow times it (python -m benchmarks.engines), so
that its peak memory is that of the engine. Every translation has exactly max_length symbols.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from benchmarks.clock import Clock, Timing

if TYPE_CHECKING:
  from lingvo_moe.tasks.mt.mt_config import MtConfig

ENGINES = ('tensorflow', 'litert_int8', 'litert_float32', 'ctranslate2_int8', 'ctranslate2_float32')
_COMPARED = ('tokens_per_s', 'median_s', 'peak_rss_mib', 'other_cores')
_NEVER = -1e9  # logit of a symbol that is chosen only where no other may be


@dataclasses.dataclass(frozen=True)
class Job:
  """Timing of an engine, in JSON on the standard input of its process."""

  sources: list[list[int]]  # each with its end
  pieces: list[list[str]]  # the sources as CTranslate2 takes them
  max_length: int
  beam_size: int
  alpha: float
  warmup: int
  calls: int


@dataclasses.dataclass(frozen=True)
class _RandomVocab:
  """Vocabulary without a SentencePiece model, which CTranslate2 takes for its pieces."""

  size: int
  model_bytes = b''

  def pieces(self, ids: Iterable[int]) -> list[str]:
    return [('<pad>', '<s>', '</s>', '<unk>')[i] if i < 4 else f'p{i}' for i in ids]


def export(folder: str, config: MtConfig, engine: str, public: str = '') -> None:
  """Writes a model to a folder for an engine: with initial weights, or with those of a public folder.

  The CTranslate2 model of a public folder is made by CTranslate2's own converter, which needs transformers and torch.
  """
  from benchmarks import processes
  from lingvo_moe.addons.export import ctranslate2_model, engine_graphs, litert_export, mt_graphs
  from lingvo_moe.addons.interop import importing
  from lingvo_moe.models.export_forms import EngineParts

  library, _, kind = engine.rpartition('_')
  if public and library == 'ctranslate2':
    flags = [f'--model={public}', f'--output_dir={folder}', f'--quantization={kind}', '--force']
    processes.run(
      [sys.executable, '-P', '-m', 'ctranslate2.converters.transformers', *flags], f'{engine}: its converter'
    )
    return
  config = dataclasses.replace(config.for_inference(), dispatch='auto', scan_layers=False)
  program = config.program()
  initial = lambda: {name: value.numpy() for name, value in program.init()['weights'].items()}
  weights = importing.read_weights(public) if public else initial()
  if library == 'litert':
    engine_graphs.require(config)
    return litert_export.save(folder, program, EngineParts(mt_graphs.make(config), {}, {}), weights, {}, kind)
  ctranslate2_model.require(config)
  source = config.source_vocab_size
  vocabs = _RandomVocab(source), _RandomVocab(source if config.shared_vocab else config.target_vocab_size)
  ctranslate2_model.save(folder, config, vocabs, weights, quantization=kind)


def compare(
  config: MtConfig,
  rows: int | None,
  engines: Sequence[str],
  clock: Clock,
  rounds: int,
  tensorflow: Sequence[str],
  progress: Callable[[str], object] = lambda _: None,
  public: str = '',
) -> list[Timing]:
  """Times the engines in turn, each in processes of its own.

  Args:
    config: the model.
    rows: number of sentences, of a full batch the first; None: all.
    engines: of ENGINES.
    clock: number of calls.
    rounds: number of processes of each engine.
    tensorflow: command that times TensorFlow, to which --json is added.
    progress: function called with a line of text before each process.
    public: path of the public folder that has the weights, if any.

  Returns:
    For each engine: engine, medians over its rounds (tokens_per_s, s_per_sentence, peak_rss_mib, other_cores),
    tokens_per_s_of_rounds, and ratio, to the tokens a second of the first engine.
  """
  from benchmarks import processes
  from lingvo_moe.addons.interop import importing
  from lingvo_moe.tasks.task import task_of

  sources = task_of(config).random_batch()['src_ids'][:rows].tolist()
  if public:
    names = importing.pieces(public)
    pieces = [[names[i] for i in row] for row in sources]
  else:
    pieces = [_RandomVocab(config.source_vocab_size).pieces(row[:-1]) for row in sources]  # the end is added there
  job = Job(sources, pieces, config.max_length, config.beam_size, config.length_norm_alpha, **dataclasses.asdict(clock))
  runs, compared = {}, []
  with tempfile.TemporaryDirectory() as folder:
    for engine in engines:
      if engine == 'tensorflow':
        runs[engine] = functools.partial(processes.records, tensorflow, engine)
        continue
      path = os.path.join(folder, engine)
      os.mkdir(path)
      progress(f'export: {engine}')
      export(path, config, engine, public)
      runs[engine] = functools.partial(processes.of_engine, 'benchmarks.engines', engine, path, job)
    found = processes.alternate(runs, rounds, progress)
  for engine, timed in found.items():
    of_rounds = {name: [timing[name] for (timing,) in timed] for name in _COMPARED}
    medians = {name: statistics.median(values) for name, values in of_rounds.items()}
    compared.append({'engine': engine, **medians, 'sentences': len(sources), 'beam_size': config.beam_size})
    compared[-1]['s_per_sentence'] = round(medians['median_s'] / len(sources), 6)
    compared[-1]['tokens_per_s_of_rounds'] = of_rounds['tokens_per_s']
    compared[-1]['ratio'] = round(medians['tokens_per_s'] / compared[0]['tokens_per_s'], 4)
  return compared


def measure(job: Job, engine: str, folder: str) -> Timing:
  """Times a translation of all sources by an engine, with the model that was exported to a folder."""
  library, _, kind = engine.rpartition('_')
  translate = {'litert': _litert, 'ctranslate2': _ctranslate2}[library](job, folder, kind)
  lengths = set()
  timing = Clock(job.warmup, job.calls).time(lambda: lengths.update(translate()))
  if lengths != {job.max_length}:
    raise RuntimeError(f'every translation must have {job.max_length} symbols; saw {sorted(lengths)}')
  return {**timing, 'tokens_per_s': round(len(job.sources) * job.max_length / timing['median_s'], 1)}


def _litert(job: Job, folder: str, kind: str) -> Callable[[], list[int]]:
  """Function that translates by the engine, and returns the numbers of symbols."""
  import numpy as np

  from lingvo_moe.addons.engine import search, stages
  from lingvo_moe.addons.engine.graph import available_threads
  from lingvo_moe.addons.engine.lanes import Lanes
  from lingvo_moe.addons.engine.numpy_beam import BeamValues
  from lingvo_moe.search.length_norm import LengthNorm
  from lingvo_moe.vocab.vocab import EOS

  run = stages.StagedGraph.run

  def run_endless(graph):
    """Runs a graph; hypotheses of a decoder then end only where they must."""
    run(graph)
    if 'logits' in graph.outputs:
      graph.output('logits')[:, EOS] = _NEVER
    if 'next_symbols' in graph.outputs:
      graph.output('next_log_probs')[graph.output('next_symbols') == EOS] = -np.inf

  stages.StagedGraph.run = run_endless
  lanes, values = Lanes(folder, available_threads()), BeamValues(job.beam_size, 1, LengthNorm(job.alpha), 'exact')
  batches = lanes.batches(list(map(len, job.sources)), sum(map(len, job.sources)))

  def translate(batch, decoder, encoder):
    memory, lengths_B = search.encode(encoder, [job.sources[i] for i in batch]), np.full(len(batch), job.max_length)
    return search.search(decoder, memory, lengths_B, values).lengths_BW[:, 0]

  graphs = 'decoder', 'encoder'
  return lambda: [int(length) for _, lengths_B in lanes.run(translate, batches, graphs) for length in lengths_B]


def _ctranslate2(job: Job, folder: str, kind: str) -> Callable[[], list[int]]:
  """Function that translates by CTranslate2, and returns the numbers of symbols."""
  import ctranslate2

  cores = len(os.sched_getaffinity(0))
  translator = ctranslate2.Translator(folder, inter_threads=1, intra_threads=cores, compute_type=kind)
  lengths = {'min_decoding_length': job.max_length, 'max_decoding_length': job.max_length}
  search = {'beam_size': job.beam_size, 'length_penalty': job.alpha, 'max_batch_size': 0, 'max_input_length': 0}
  return lambda: [len(result.hypotheses[0]) for result in translator.translate_batch(job.pieces, **search, **lengths)]


if __name__ == '__main__':
  engine, folder, results = sys.argv[1:]
  timing = measure(Job(**json.load(sys.stdin)), engine, folder)
  assert 'tensorflow' not in sys.modules
  with open(results.removeprefix('--json='), 'w', encoding='utf-8') as f:
    f.write(json.dumps(timing) + '\n')
