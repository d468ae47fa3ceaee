"""Benchmark of steps of a model on random ids: a train step, and beam search over a full batch or one sentence."""

from collections.abc import Callable, Iterable

from benchmarks import profile as profile_lib
from benchmarks.clock import Clock, Timing
from lingvo_moe.addons.analysis import flops
from lingvo_moe.core.errors import UserError
from lingvo_moe.layers.gates.routing import RoutingStats
from lingvo_moe.models.batches import SOURCE_KEYS
from lingvo_moe.program import Program
from lingvo_moe.runtime.runtime import Runtime
from lingvo_moe.tasks import inference
from lingvo_moe.tasks.model_config import ModelConfig
from lingvo_moe.tasks.mt.mt_config import MtConfig
from lingvo_moe.tasks.task import task_of

MakeRuntime = Callable[[Program], Runtime]


def train(config: ModelConfig, clock: Clock, make: MakeRuntime, profile: bool = False) -> Timing:
  """Times a train step: forward, backward and update. Tokens that the loss is over count, and those of a source.

  Returns:
    The Timing, with tokens_per_s, flops, loss_went_down, and for a model with experts dispatch, num_groups and
    dropped of the last step. With `profile`, which traces a few more steps, parts_s: see profile.by_part.
  """
  task = task_of(config)
  batch = task.random_batch()
  runtime = make(config.program())
  runtime.init()
  metrics = []
  timing = clock.time(lambda: metrics.append(runtime.train_step(batch)))
  tokens = sum(float(metrics[-1][name]) for name in task.token_counts)
  timing |= {
    'tokens_per_s': round(tokens / timing['median_s'], 1),
    'flops': sum(flops.train_step(config).values()),
    'loss_went_down': bool(metrics[-1]['loss'] < metrics[0]['loss']),
  }
  if routing := metrics[-1].get('routing'):
    timing |= {'dispatch': config.dispatch, 'num_groups': config.num_groups, **dropped(routing.values())}
  if profile:
    seconds = profile_lib.by_part(lambda: runtime.train_step(batch))
    timing['parts_s'] = {part: round(s, 6) for part, s in seconds.items()}
  return timing


def dropped(stats: Iterable[RoutingStats]) -> dict[str, float]:
  """Shares of tokens, over layers, whose first choice was dropped, whose second was, and whose second was skipped."""
  counts = [(s.dropped_R[0], sum(s.dropped_R[1:]), s.skipped, s.tokens) for s in stats]
  *sums, tokens = (sum(map(float, column)) for column in zip(*counts, strict=True))
  names = 'first_dropped', 'second_dropped', 'second_skipped'
  return {name: round(count / tokens, 4) for name, count in zip(names, sums, strict=True)}


def decode(config: MtConfig, clock: Clock, make: MakeRuntime, rows: int | None = None) -> Timing:
  """Times beam search to max_length over the first rows of a full batch, by default all.

  Output symbols of the best hypotheses count as tokens. Of one row median_s is the latency of a sentence.
  """
  batch = {name: value[:rows] for name, value in task_of(config).random_batch().items() if name in SOURCE_KEYS}
  rows, length = len(batch['src_ids']), config.max_length
  program = config.program()
  runtime = make(program)
  runtime.init()
  if rows % runtime.row_multiple:
    raise UserError(
      f'the rows of a batch must be a multiple of the {runtime.row_multiple} parts that the mesh splits them into; '
      f'there {"is" if rows == 1 else "are"} {rows}: take another mesh, or none'
    )
  model, theta = program.model, program.theta
  search = runtime.function(lambda w, batch: inference.search(model, theta(w), batch, config, min_length=length))
  steps = []
  timing = clock.time(lambda: steps.append(search(batch).steps))
  if steps[-1] != length:
    raise UserError(f'decoding must make {length} steps to be timed; it made {steps[-1]}: bind decode_ratio = 1.0')
  return {
    **timing,
    'tokens_per_s': round(rows * length / timing['median_s'], 1),
    'flops': sum(flops.decode(config, rows).values()),
    'sentences': rows,
    'beam_size': config.beam_size,
  }
