"""Whole steps of a model on random ids at its full batch: a train step, and beam search over many sentences or one."""

from __future__ import annotations

from collections.abc import Callable

from lingvo_moe.analysis import flops
from lingvo_moe.bench import profile as profile_lib
from lingvo_moe.bench.clock import Clock
from lingvo_moe.bench.clock import Timing
from lingvo_moe.core.errors import UserError
from lingvo_moe.program import Program
from lingvo_moe.runtime.runtime import Runtime
from lingvo_moe.tasks.mt import assembly
from lingvo_moe.tasks.mt import decoding
from lingvo_moe.tasks.mt.config import MtConfig
from lingvo_moe.tasks.mt.random_batch import random_batch

MakeRuntime = Callable[[Program], Runtime]


def train(config: MtConfig, clock: Clock, make: MakeRuntime, profile: bool = False) -> Timing:
  """Times forward, backward and update; tokens of both sides count.

  Args:
    config: the model.
    clock: how often.
    make: the runtime of a program.
    profile: whether to trace a few more steps, of TensorFlow's own kernels, and tell what each part took.

  Returns:
    The Timing, with tokens_per_s, flops, whether the loss went down, and for a model with experts num_groups and the
    shares of tokens whose first choice was dropped, whose second was, and whose second was skipped at random, of the
    last step, over all layers. With a profile parts_s: see profile.by_part.
  """
  batch = random_batch(config)
  runtime = _ready(make, config.program())
  metrics = []
  found = clock.time(lambda: metrics.append(runtime.train_step(batch)))
  found |= {
    'tokens_per_s': round(2 * batch['src_ids'].size / found['median_s'], 1),
    'flops': sum(flops.train_step(config).values()),
    'loss_went_down': bool(metrics[-1]['loss'] < metrics[0]['loss']),
    **_choices(config, metrics[-1].get('routing', {})),
  }
  if profile:
    seconds = profile_lib.by_part(lambda: runtime.train_step(batch))
    found['parts_s'] = {part: round(s, 6) for part, s in seconds.items()}
  return found


def decode(config: MtConfig, clock: Clock, make: MakeRuntime) -> Timing:
  """Times beam search over a full batch, to max_length; the symbols put out count."""
  return _search(config, clock, make, random_batch(config))


def latency(config: MtConfig, clock: Clock, make: MakeRuntime) -> Timing:
  """Times beam search over one sentence of max_length tokens, to max_length: median_s is seconds a sentence."""
  return _search(config, clock, make, {name: value[:1] for name, value in random_batch(config).items()})


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
    lambda weights, batch: decoding.search(
      program.task, program.theta(weights), batch, config, min_length=config.max_length
    )
  )
  sources = {name: value for name, value in batch.items() if name in assembly.SOURCE_KEYS}
  steps = []
  found = clock.time(lambda: steps.append(search(sources).steps))
  if steps[-1] != config.max_length:
    raise UserError(
      f'decoding must make {config.max_length} steps to be timed; it made {steps[-1]}: bind decode_ratio = 1.0'
    )
  return {
    **found,
    'tokens_per_s': round(rows * config.max_length / found['median_s'], 1),
    'flops': sum(flops.decode(config, rows).values()),
    'sentences': rows,
    'beam_size': config.beam_size,
  }


def _ready(make: MakeRuntime, program: Program) -> Runtime:
  runtime = make(program)
  runtime.init()
  return runtime


def _choices(config: MtConfig, routing) -> Timing:
  """How tokens were grouped, and what became of their choices; nothing for a dense model."""
  if not routing:
    return {}
  tokens = sum(stats.tokens for stats in routing.values())
  share = lambda name: round(float(sum(getattr(stats, name) for stats in routing.values()) / tokens), 4)
  return {
    'dispatch': config.dispatch,
    'num_groups': config.num_groups,
    'first_dropped': share('first_dropped'),
    'second_dropped': share('second_dropped'),
    'second_skipped': share('second_skipped'),
  }
