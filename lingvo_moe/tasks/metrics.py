"""Scalars for the log of a training step from the metrics of tasks with a token loss; perplexities and tables."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lingvo_moe.core.errors import UserError
from lingvo_moe.storage import log_directory


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
  """Loss, parts of the objective, gradient norm and learning rate by name; of MoE layers balance, drops and entropy.

  Args:
    metrics: a training step's, with 'xent' and 'target_tokens' summed over the batch; with MoE layers also 'aux_loss'
      and 'routing', {layer: Stats}.

  Raises:
    UserError: without a loss of tokens, which a task of one's own may have.
  """
  if missing := {'xent', 'target_tokens'} - metrics.keys():
    raise UserError(
      f"the metrics of a training step must have 'xent' and 'target_tokens', summed over the batch; saw no "
      f'{" and no ".join(sorted(missing))}: return them from the loss, or override scalars() of the task'
    )
  tokens = max(float(metrics['target_tokens']), 1.0)
  flat = {
    'loss': metrics['xent'] / tokens,
    **{log_directory.objective_part(name): value for name, value in metrics.get('objective_parts', {}).items()},
    **({'aux_loss': metrics['aux_loss']} if 'aux_loss' in metrics else {}),
    'grad_norm': metrics['grad_norm'],
    'learning_rate': metrics['learning_rate'],
    'target_tokens': metrics['target_tokens'],
  }
  for layer, stats in metrics.get('routing', {}).items():
    flat |= {log_directory.moe_metric(layer, name): value for name, value in _routing_scalars(stats).items()}
  return {name: float(value) for name, value in flat.items()}


def _routing_scalars(stats) -> dict[str, float]:
  routed = max(float(stats.tokens), 1.0)
  return {
    'aux_loss': stats.aux_loss / max(float(stats.groups), 1.0),
    **{log_directory.dropped(r): count / routed for r, count in enumerate(stats.dropped_R)},
    'second_skipped': stats.skipped / routed,
    'entropy': stats.entropy / routed,
    'z_loss': stats.z_loss / routed,
    'rounds': stats.rounds,
    'largest_load': stats.tokens_E.max() / max(stats.tokens_E.mean(), 1e-9),
  }


def perplexity(nats: float, tokens: float) -> dict[str, float]:
  """Cross-entropy of a text in nats a token, and perplexity a token, from its nats in all."""
  mean = float(nats) / max(float(tokens), 1.0)
  return {'tokens': int(tokens), 'cross_entropy': mean, 'perplexity': _exp(mean)}


def loads(metrics: Mapping[str, Any]) -> dict[str, Any]:
  """Choices with a slot of each expert [E], by MoE layer; {} without experts."""
  return {layer: stats.tokens_E for layer, stats in metrics.get('routing', {}).items()}


def dropped_share(metrics: Mapping[str, Any]) -> float:
  """Share of the tokens' choices that found no slot, over all MoE layers; of expert choice, of tokens not chosen."""
  layers = metrics.get('routing', {}).values()
  choices = sum(float(stats.tokens) * len(stats.dropped_R) for stats in layers)
  return sum(float(sum(stats.dropped_R)) for stats in layers) / max(choices, 1.0)


def by_unit(nats: float, words: float, bytes: float) -> dict[str, float]:
  """Perplexity a word and bits a byte of a text, which do not depend on its vocabulary."""
  return {
    'perplexity_per_word': _exp(float(nats) / max(words, 1)),
    'bits_per_byte': float(nats) / math.log(2) / max(bytes, 1),
  }


def _exp(x: float) -> float:
  return math.exp(min(x, 700.0))


class Column(NamedTuple):
  """Column of a table for people."""

  heading: str
  name: str  # of the number
  format: str  # with its width


def table(heading: str, rows: Mapping[str, Mapping[str, Any]], columns: Sequence[Column]) -> str:
  """Numbers as a table: a line for each row, which begins with its name, below a line of headings.

  A number that a row lacks is left empty, and a column that all rows lack is left out.
  """
  columns = [column for column in columns if any(column.name in row for row in rows.values())]
  width = max(len(heading), *map(len, rows))
  cells = lambda cell: '  '.join(map(cell, columns))
  padded = lambda text, c: f'{text:>{int(c.format[:-1].partition(".")[0])}}'
  cell = lambda c, row: f'{row[c.name]:{c.format}}' if row.get(c.name) is not None else padded('', c)
  head = cells(lambda c: padded(c.heading, c))
  lines = [f'{name:{width}}  ' + cells(lambda c, row=row: cell(c, row)) for name, row in rows.items()]
  return '\n'.join([f'{heading:{width}}  {head}', *lines])
