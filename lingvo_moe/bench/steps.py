"""Benchmark of steps of a model on random ids: a train step, and beam search over a full batch or one sentence."""

from __future__ import annotations

from collections.abc import Callable

from lingvo_moe.analysis import flops
from lingvo_moe.bench import moe_layer
from lingvo_moe.bench import profile as profile_lib
from lingvo_moe.bench.clock import Clock, Timing
from lingvo_moe.core.errors import UserError
from lingvo_moe.program import Program
from lingvo_moe.runtime.runtime import Runtime
from lingvo_moe.tasks import inference
from lingvo_moe.tasks.batches import SOURCE_KEYS
from lingvo_moe.tasks.mt.config import MtConfig
from lingvo_moe.tasks.task import task_of
from lingvo_moe.tasks.transformer_config import ModelConfig

MakeRuntime = Callable[[Program], Runtime]


def train(config: ModelConfig, clock: Clock, make: MakeRuntime, profile: bool = False) -> Timing:
  """Times a train step: forward, backward and update. Tokens that the loss is over count, and those of a source.

  Args:
    config: configuration of the model.
    clock: number of calls.
    make: function that makes the runtime of a program.
    profile: True to trace a few more steps, of TensorFlow's own kernels, for the seconds of each part.

  Returns:
    The Timing, with tokens_per_s, flops, loss_went_down, and for a model with experts dispatch, num_groups and
    moe_layer.dropped of the last step. With a profile parts_s: see profile.by_part.
  """
  task = task_of(config)
  batch = task.random_batch()
  runtime = _ready(make, config.program())
  metrics = []
  timing = clock.time(lambda: metrics.append(runtime.train_step(batch)))
  tokens = sum(float(metrics[-1][name]) for name in task.token_counts)
  timing |= {
    'tokens_per_s': round(tokens / timing['median_s'], 1),
    'flops': sum(flops.train_step(config).values()),
    'loss_went_down': bool(metrics[-1]['loss'] < metrics[0]['loss']),
  }
  if routing := metrics[-1].get('routing'):
    timing |= {'dispatch': config.dispatch, 'num_groups': config.num_groups, **moe_layer.dropped(routing.values())}
  if profile:
    seconds = profile_lib.by_part(lambda: runtime.train_step(batch))
    timing['parts_s'] = {part: round(s, 6) for part, s in seconds.items()}
  return timing


def decode(config: MtConfig, clock: Clock, make: MakeRuntime) -> Timing:
  """Times beam search over a full batch, to max_length; tokens_per_s counts output symbols of the best hypotheses."""
  return _search(config, clock, make, task_of(config).random_batch())


def latency(config: MtConfig, clock: Clock, make: MakeRuntime) -> Timing:
  """Times beam search over one sentence of max_length tokens, to max_length: median_s is the latency of a sentence."""
  return _search(config, clock, make, {name: value[:1] for name, value in task_of(config).random_batch().items()})


def _search(config, clock, make, batch) -> Timing:
  rows = len(batch['src_ids'])
  program = config.program()
  runtime = _ready(make, program)
  if rows % runtime.row_multiple:
    raise UserError(
      f'the rows of a batch must be a multiple of the {runtime.row_multiple} parts that the mesh splits them into; '
      f'there {"is" if rows == 1 else "are"} {rows}: take another mesh, or none'
    )
  search = runtime.function(
    lambda weights, batch: inference.search(
      program.model, program.theta(weights), batch, config, min_length=config.max_length
    )
  )
  sources = {name: value for name, value in batch.items() if name in SOURCE_KEYS}
  steps = []
  timing = clock.time(lambda: steps.append(search(sources).steps))
  if steps[-1] != config.max_length:
    raise UserError(
      f'decoding must make {config.max_length} steps to be timed; it made {steps[-1]}: bind decode_ratio = 1.0'
    )
  return {
    **timing,
    'tokens_per_s': round(rows * config.max_length / timing['median_s'], 1),
    'flops': sum(flops.decode(config, rows).values()),
    'sentences': rows,
    'beam_size': config.beam_size,
  }


def _ready(make: MakeRuntime, program: Program) -> Runtime:
  runtime = make(program)
  runtime.init()
  return runtime
