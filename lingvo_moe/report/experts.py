"""Section of a report on experts: for every MoE layer its loads, drops, entropy and dead experts, and who uses which."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence

from lingvo_moe.core import log_directory
from lingvo_moe.core.errors import counted
from lingvo_moe.report import figures
from lingvo_moe.report import languages
from lingvo_moe.report import svg
from lingvo_moe.report import training
from lingvo_moe.report.markup import Markup
from lingvo_moe.report.markup import join
from lingvo_moe.report.markup import tag
from lingvo_moe.report.reading import RunRecord
from lingvo_moe.report.series import Series
from lingvo_moe.report.series import chosen
from lingvo_moe.report.series import text
from lingvo_moe.report.svg import Curve

# Loads in multiples of a fair share: the largest of each level; above the last one there is one more. Level 0 is none.
_BOUNDS = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
_LEVELS = ('none', 'to ¼', 'to ½', 'to 0.8', 'to 1¼', 'to 2', 'to 4', 'above')
_ROWS = 128  # of a heat map over experts; of more experts, neighbours share a row
_COLUMNS = 60  # of a heat map over time
_CELLS = 600  # of a table, at most
_DEAD = 'Experts without one choice since the point before.'


def section(records: Sequence[RunRecord]) -> Markup:
  """Every MoE layer, or a sentence on why there is none."""
  parts = [figures.absent(_why_dense(record)) for record in records if not record.layers]
  routed = [record for record in records if record.layers]
  parts += [
    figures.absent(
      f'{record.name} has no routing.jsonl: it was trained by a version that did not keep the load of each expert. '
      'What the log has of its layers is shown.'
    )
    for record in routed
    if not record.run.loads
  ]
  parts += [
    figures.absent(
      f'{record.name} has no dev_routing.json, which an evaluation of the dev loss leaves, so it does not say which '
      'experts serve which languages.'
    )
    for record in routed
    if not record.run.dev_routing
  ]
  layers = list(dict.fromkeys(layer for record in routed for layer in record.layers))
  if any(record.run.loads or record.run.dev_routing for record in routed):
    parts.append(_scale())
  points = max(24, min(training.POINTS, 1200 // max(1, len(layers))))
  for layer in layers:
    parts.append(tag('h3', layer))
    parts.append(_layer(layer, [record for record in routed if layer in record.layers], points))
  return join(parts)


def fair_shares(loads: Sequence[float]) -> list[float]:
  """Loads in multiples of the mean load: 1 is a fair share."""
  mean = sum(loads) / max(len(loads), 1)
  return [load / mean if mean else 0.0 for load in loads]


def level(share: float) -> int:
  """Colour of a load in multiples of a fair share."""
  return 0 if share <= 0 else 1 + sum(share > bound for bound in _BOUNDS)


def _why_dense(record: RunRecord) -> str:
  if record.averaged and record.run.values.get('num_experts'):
    return f'{record.name} is the average of {record.averaged}: loads of its own experts were not counted.'
  if record.run.values.get('num_experts'):
    return f'{record.name} has experts, but its log has no line of a training step yet.'
  return f'{record.name} is a dense model: it has no experts.'


def _scale() -> Markup:
  """What the colours of heat maps stand for."""
  squares = [
    tag(
      'li',
      tag('svg', tag('rect', width=16, height=10, class_=f'l{i}'), viewBox='0 0 16 10', aria_hidden='true'),
      ' ',
      name,
    )
    for i, name in enumerate(_LEVELS)
  ]
  about = (
    'Colours of heat maps are loads in multiples of a fair share, which is 1 for an expert with as many choices as the '
    'mean of its layer. Choices are those of tokens that found a slot.'
  )
  return join([tag('p', about), tag('ul', *squares, class_='legend')])


def _layer(layer: str, records: Sequence[RunRecord], points: int) -> Markup:
  of = lambda record, title: title if record.alone else f'{title}, {record.name}'
  parts = [_loads(record, layer, of(record, 'Load by expert')) for record in records]
  key = functools.partial(log_directory.moe_metric, layer)
  present = dict.fromkeys(s for record in records for s in record.layers[layer])
  drops = {key(s): s.replace('_', ' ') for s in present if log_directory.is_dropped(s)}
  if any(line.get(key('second_skipped')) for record in records for line in record.steps):
    drops[key('second_skipped')] = 'second skipped'
  parts.append(
    figures.curves(
      'Choices without a slot',
      training.curves_of(records, drops, points=points),
      'step',
      'Choices of each rank a token; skipped ones at random, dropped ones for want of room.',
    )
  )
  parts.append(
    figures.curves(
      'Entropy of the gate',
      training.curves_of(records, {key('entropy'): 'nats'}, points=points),
      'step',
      'Nats a token; the logarithm of the number of experts if all are equally likely.',
    )
  )
  parts.append(
    figures.curves(
      'Largest load',
      training.curves_of(records, {key('largest_load'): 'multiples of the mean'}, points=points),
      'step',
      'Load of the fullest expert in multiples of the mean load.',
    )
  )
  parts.append(figures.curves('Dead experts', [_dead(record, layer) for record in records], 'step', _DEAD, True))
  parts += [_by_language(record, layer, of(record, 'Languages and experts')) for record in records]
  return figures.grid(*parts)


def _dead(record: RunRecord, layer: str) -> Curve:
  loads = [load for load in record.run.loads if layer in load.choices]
  xs, ys, begin = [], [], 0
  for end in (i + 1 for i in chosen(len(loads), _COLUMNS)):  # each point is of all records since the point before
    choices = zip(*(load.choices[layer] for load in loads[begin:end]))
    xs.append(float(loads[end - 1].step))
    ys.append(float(sum(not any(n > 0 for n in of_expert) for of_expert in choices)))
    begin = end
  return Curve(record.label('dead', sole=True), Series(xs, ys, ys, ys), record.place, record.place)


def _loads(record: RunRecord, layer: str, title: str) -> Markup | None:
  """Heat map of loads, experts by time."""
  kept = [load for load in record.run.loads if layer in load.choices]
  if not kept:
    return None
  kept = [kept[i] for i in chosen(len(kept), _COLUMNS)]
  experts = len(kept[-1].choices[layer])
  kept = [load for load in kept if len(load.choices[layer]) == experts]
  by_time = [fair_shares(load.choices[layer]) for load in kept]
  rows, names = _rows(by_time, experts)
  last = by_time[-1]
  fullest = max(range(experts), key=last.__getitem__)
  dead = [str(e) for e in range(experts) if last[e] <= 0]
  label = (
    f'{title} in {layer}: {experts} experts over {counted(len(kept), "span")} of steps. At step {text(kept[-1].step)} expert '
    f'{fullest} is the fullest with {text(last[fullest])} times a fair share; dead experts: '
    + (', '.join(dead[:8]) or 'none')
    + (f' and {len(dead) - 8} more' if len(dead) > 8 else '')
  )
  note = 'A row for each expert' if len(rows) == experts else f'A row for each {-(-experts // len(rows))} experts'
  note += '; each column is of the steps since the column before.' if len(kept) == len(record.run.loads) else '.'
  picture = svg.heat_map(
    [[level(share) for share in row] for row in rows],
    names,
    [text(load.step) for load in kept],
    'step',
    label,
  )
  return figures.figure(title, picture, _load_table(title, kept, by_time, experts), note)


def _rows(by_time: Sequence[Sequence[float]], experts: int) -> tuple[list[list[float]], list[str]]:
  """(rows of a heat map with a value for each time, their names); of many experts, means over neighbours."""
  size = -(-experts // _ROWS)
  spans = [range(begin, min(begin + size, experts)) for begin in range(0, experts, size)]
  rows = [[sum(shares[e] for e in span) / len(span) for shares in by_time] for span in spans]
  return rows, [str(span[0]) if size == 1 else f'{span[0]}–{span[-1]}' for span in spans]


def _load_table(title, kept, by_time, experts) -> Markup:
  """Loads in multiples of a fair share: of each expert, or of many experts their least, median and largest."""
  few = experts <= 32
  columns = experts if few else 4
  times = chosen(len(kept), max(4, _CELLS // columns))
  if few:
    head = ['step', *(f'expert {e}' for e in range(experts))]
    rows = [[kept[t].step, *(f'{share:.2f}' for share in by_time[t])] for t in times]
  else:
    head = ['step', 'least', 'median', 'largest', 'dead']
    summary = lambda shares: [f'{f(shares):.2f}' for f in (min, statistics.median, max)]
    rows = [[kept[t].step, *summary(by_time[t]), sum(share <= 0 for share in by_time[t])] for t in times]
  return figures.table(head, rows, title)


def _by_language(record: RunRecord, layer: str, title: str) -> Markup | None:
  """Heat map of the shares of a language's choices that each expert serves."""
  found = record.run.dev_routing
  if not found or not found['choices'].get(layer):
    return None
  choices = dict(zip(map(str, found['subsets']), found['choices'][layer], strict=True))
  names, by = languages.in_order([record], [name for name, loads in choices.items() if sum(loads) > 0])
  if not names:
    return None
  shares = {name: fair_shares(choices[name]) for name in names}
  experts = len(shares[names[0]])
  if any(len(row) != experts for row in shares.values()):
    return None
  columns, experts_of = _rows([shares[name] for name in names], experts)
  by_name = list(zip(*columns, strict=True))
  top = {name: max(range(experts), key=shares[name].__getitem__) for name in names}
  label = f'{title} in {layer} on dev: ' + '; '.join(
    f'{name} most by expert {top[name]} ({text(shares[name][top[name]])} times a fair share)' for name in names[:12]
  )
  picture = svg.heat_map([[level(share) for share in row] for row in by_name], names, experts_of, 'expert', label)
  few = experts <= 32
  head = [
    'part',
    *((f'expert {e}' for e in range(experts)) if few else ('most by expert', 'times a fair share', 'unused')),
  ]
  rows = [[name, *((f'{s:.2f}' for s in shares[name]) if few else _summary(shares[name], top[name]))] for name in names]
  note = f'Dev text at step {text(found.get("step"))}, {by}. A fair share is an equal one of the choices of a language.'
  return figures.figure(title, picture, figures.table(head, rows, title), note)


def _summary(shares: Sequence[float], top: int) -> tuple[str, str, int]:
  return str(top), f'{shares[top]:.2f}', sum(share <= 0 for share in shares)
