"""Section of a report on experts: of every MoE layer loads, drops, entropy, dead experts, and who uses which."""

import functools
import statistics
from collections.abc import Sequence
from typing import Any

from lingvo_moe.addons.report import figures, languages_section, svg, training_section
from lingvo_moe.addons.report.escaped_html import Html, join, tag
from lingvo_moe.addons.report.reading import RunRecord
from lingvo_moe.addons.report.series import chosen, text, thinned
from lingvo_moe.addons.report.svg import Curve
from lingvo_moe.core.errors import listed, plural
from lingvo_moe.storage import log_directory

# Loads in multiples of a fair share: the largest of each level; above the last one there is one more. Level 0 is none.
_BOUNDS = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
_LEVELS = ('none', 'to ¼', 'to ½', 'to 0.8', 'to 1¼', 'to 2', 'to 4', 'above')
_ROWS = 128  # of a heat map over experts; of more experts, neighbours share a row
_COLUMNS = 60  # of a heat map over time
_CELLS = 600  # of a table, at most
_FEW = 32  # experts with a column each in a table

_NO_LOADS = (
  'has no routing.jsonl: it was trained by a version that did not keep the load of each expert. What the log has of '
  'its layers is shown.'
)
_NO_DEV_ROUTING = (
  'has no dev_routing.json, which an evaluation of the dev loss leaves, so it does not say which experts serve which '
  'languages.'
)


def section(records: Sequence[RunRecord]) -> Html:
  """Every MoE layer, or a sentence on why there is none."""
  routed = [record for record in records if record.layers]
  parts = [figures.absent(_why_dense(record)) for record in records if not record.layers]
  parts += [figures.absent(f'{record.name} {_NO_LOADS}') for record in routed if not record.run.loads]
  parts += [figures.absent(f'{record.name} {_NO_DEV_ROUTING}') for record in routed if not record.run.dev_routing]
  layers = list(dict.fromkeys(layer for record in routed for layer in record.layers))
  if any(record.run.loads or record.run.dev_routing for record in routed):
    parts.append(_scale())
  points = max(24, min(training_section.POINTS, 1200 // max(1, len(layers))))
  for layer in layers:
    parts += [tag('h3', layer), _layer(layer, [record for record in routed if layer in record.layers], points)]
  return join(parts)


def fair_shares(loads: Sequence[float]) -> list[float]:
  """Loads in multiples of the mean load: 1 is a fair share."""
  mean = sum(loads) / max(len(loads), 1)
  return [load / mean if mean else 0.0 for load in loads]


def level(share: float) -> int:
  """Colour of a load in multiples of a fair share."""
  return 0 if share <= 0 else 1 + sum(share > bound for bound in _BOUNDS)


def _why_dense(record: RunRecord) -> str:
  if not record.run.values.get('num_experts'):
    return f'{record.name} is a dense model: it has no experts.'
  if record.averaged:
    return f'{record.name} is the average of {record.averaged}: loads of its own experts were not counted.'
  return f'{record.name} has experts, but its log has no line of a training step yet.'


def _scale() -> Html:
  about = (
    'Colours of heat maps are loads in multiples of a fair share, which is 1 for an expert with as many choices as the '
    'mean of its layer. Choices are those of tokens that found a slot.'
  )
  names = []
  for i, name in enumerate(_LEVELS):
    square = tag('rect', width=16, height=10, class_=f'l{i}')
    names.append(tag('li', tag('svg', square, viewBox='0 0 16 10', aria_hidden='true'), ' ', name))
  return join([tag('p', about), tag('ul', *names, class_='legend')])


def _layer(layer: str, records: Sequence[RunRecord], points: int) -> Html:
  titled = lambda record, title: title if record.alone else f'{title}, {record.name}'
  key = functools.partial(log_directory.moe_metric, layer)
  statistics_of = dict.fromkeys(statistic for record in records for statistic in record.layers[layer])
  drops = {key(s): s.replace('_', ' ') for s in statistics_of if log_directory.is_dropped(s)}
  if any(line.get(key('second_skipped')) for record in records for line in record.steps):
    drops[key('second_skipped')] = 'second skipped'
  drops_note = 'Choices of each rank a token; skipped ones at random, dropped ones for want of room.'
  entropy, largest = {key('entropy'): 'nats'}, {key('largest_load'): 'multiples of the mean'}
  quantities = (
    ('Choices without a slot', drops, drops_note),
    ('Entropy of the gate', entropy, 'Nats a token; the logarithm of the number of experts if all are equally likely.'),
    ('Largest load', largest, 'Load of the fullest expert in multiples of the mean load.'),
  )
  dead = [_dead(record, layer) for record in records]
  return figures.grid(
    *(_loads(record, layer, titled(record, 'Load by expert')) for record in records),
    *(
      figures.curves(title, training_section.curves_of(records, by, points), 'step', note)
      for title, by, note in quantities
    ),
    figures.curves('Dead experts', dead, 'step', 'Experts without one choice since the point before.', True),
    *(_by_language(record, layer, titled(record, 'Languages and experts')) for record in records),
  )


def _dead(record: RunRecord, layer: str) -> Curve:
  loads = [load for load in record.run.loads if layer in load.choices]
  points, ends = [], [i + 1 for i in chosen(len(loads), _COLUMNS)]
  for begin, end in zip([0, *ends], ends):  # each point is of all records since the point before
    by_expert = zip(*(load.choices[layer] for load in loads[begin:end]))
    points.append((loads[end - 1].step, sum(not any(n > 0 for n in choices) for choices in by_expert)))
  return Curve(record.label('dead', sole=True), thinned(points), record.place, record.place)


def _loads(record: RunRecord, layer: str, title: str) -> Html | None:
  """Heat map of loads, experts by time."""
  loads = [load for load in record.run.loads if layer in load.choices]
  if not loads:
    return None
  loads = [loads[i] for i in chosen(len(loads), _COLUMNS)]
  experts = len(loads[-1].choices[layer])
  loads = [load for load in loads if len(load.choices[layer]) == experts]
  by_time = [fair_shares(load.choices[layer]) for load in loads]
  rows, names = _rows(by_time, experts)
  last = by_time[-1]
  fullest = max(range(experts), key=last.__getitem__)
  dead = [str(e) for e in range(experts) if last[e] <= 0]
  label = (
    f'{title} in {layer}: {experts} experts over {plural(len(loads), "span")} of steps. At step '
    f'{text(loads[-1].step)} expert {fullest} is the fullest with {text(last[fullest])} times a fair share; '
    f'dead experts: {listed(dead)}'
  )
  note = 'A row for each expert' if len(rows) == experts else f'A row for each {-(-experts // len(rows))} experts'
  note += '; each column is of the steps since the column before.' if len(loads) == len(record.run.loads) else '.'
  steps = [text(load.step) for load in loads]
  picture = svg.heat_map([list(map(level, row)) for row in rows], names, steps, 'step', label)
  columns = experts if experts <= _FEW else 4
  cells = {loads[t].step: by_time[t] for t in chosen(len(loads), max(4, _CELLS // columns))}
  summary = lambda shares: [*(f'{f(shares):.2f}' for f in (min, statistics.median, max)), sum(s <= 0 for s in shares)]
  table = _share_table(title, 'step', cells, ('least', 'median', 'largest', 'dead'), summary)
  return figures.figure(title, picture, table, note)


def _by_language(record: RunRecord, layer: str, title: str) -> Html | None:
  """Heat map of the shares of a language's choices that each expert serves."""
  routing = record.run.dev_routing
  if not routing or not routing['choices'].get(layer):
    return None
  choices = dict(zip(map(str, routing['subsets']), routing['choices'][layer], strict=True))
  names, by = languages_section.in_order([record], [name for name, loads in choices.items() if sum(loads) > 0])
  shares = {name: fair_shares(choices[name]) for name in names}
  if len(set(map(len, shares.values()))) != 1:
    return None
  experts = len(shares[names[0]])
  columns, experts_of = _rows(list(shares.values()), experts)
  top = {name: max(range(experts), key=of_experts.__getitem__) for name, of_experts in shares.items()}
  label = f'{title} in {layer} on dev: ' + '; '.join(
    f'{name} most by expert {top[name]} ({text(shares[name][top[name]])} times a fair share)' for name in names[:12]
  )
  levels = [list(map(level, row)) for row in zip(*columns, strict=True)]
  picture = svg.heat_map(levels, names, experts_of, 'expert', label)
  summary = lambda row: [str(row.index(max(row))), f'{max(row):.2f}', sum(share <= 0 for share in row)]
  table = _share_table(title, 'part', shares, ('most by expert', 'times a fair share', 'unused'), summary)
  note = (
    f'Dev text at step {text(routing.get("step"))}, {by}. A fair share is an equal one of the choices of a language.'
  )
  return figures.figure(title, picture, table, note)


def _rows(columns: Sequence[Sequence[float]], experts: int) -> tuple[list[list[float]], list[str]]:
  """(rows of a heat map, experts by columns; their names); of many experts, means over neighbours."""
  size = -(-experts // _ROWS)
  spans = [range(begin, min(begin + size, experts)) for begin in range(0, experts, size)]
  rows = [[sum(shares[e] for e in span) / len(span) for shares in columns] for span in spans]
  return rows, [str(span[0]) if size == 1 else f'{span[0]}–{span[-1]}' for span in spans]


def _share_table(title: str, first: str, shares: dict[Any, list[float]], columns: Sequence[str], summary) -> Html:
  """Loads in multiples of a fair share by row: of each expert, or of many experts the columns of `summary`."""
  experts = len(next(iter(shares.values())))
  if experts <= _FEW:
    columns, summary = [f'expert {e}' for e in range(experts)], lambda row: [f'{share:.2f}' for share in row]
  return figures.table([first, *columns], [[name, *summary(row)] for name, row in shares.items()], title)
