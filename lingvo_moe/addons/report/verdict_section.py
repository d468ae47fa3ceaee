"""Section of a report with the verdict on each run, and the order of several."""

from collections.abc import Sequence
from statistics import fmean

from lingvo_moe.addons.report import figures, training_section, verdict
from lingvo_moe.addons.report.escaped_html import Html, join, tag
from lingvo_moe.addons.report.reading import RunRecord
from lingvo_moe.addons.report.verdict import Judgement, Points
from lingvo_moe.core.quality import METRICS
from lingvo_moe.storage import log_directory
from lingvo_moe.storage.log_directory import number


def section(records: Sequence[RunRecord]) -> Html:
  """What is said of every run."""
  parts = []
  for dev_text in dict.fromkeys(record.dev_text for record in records):
    best = {r.name: r.best for r in records if r.best and r.dev_text == dev_text}
    parts += [_list([verdict.compared(best)])] if len(best) > 1 and dev_text else []
  for record in records:
    parts += [] if record.alone else [tag('h3', record.name)]
    parts.append(_list(findings(record)) if record.steps else figures.absent(training_section.why_no_log(record)))
  return join(parts)


def findings(record: RunRecord) -> list[Judgement]:
  """The verdict on a run with a log: what its numbers say."""
  steps, latest = record.steps, record.steps[-max(1, len(record.steps) // 10) :]
  mean = lambda name: fmean([y for line in latest if (y := number(line.get(name))) is not None] or [0.0])
  dev = _points(record.evaluations, 'dev_loss')
  ranks = METRICS.get(str(record.run.values.get('best_by')))  # checkpoints
  score = ranks.title if ranks else None
  scores = _points(record.evaluations, f'dev_{score}'.lower()) if score else []
  if diverged := verdict.diverged(record.run.finished, log_directory.NOT_FINITE):
    found = [diverged]
  else:
    found = [
      verdict.improving(scores, f'{score} of dev text', larger=True) if scores else verdict.improving(dev),
      verdict.over_fitting(dev, _points(steps, 'loss')),
    ]
  loads = record.run.loads[-max(1, len(record.run.loads) // 5) :]
  layers = {layer for load in loads for layer in load.choices}
  by_expert = {layer: zip(*(load.choices[layer] for load in loads if layer in load.choices)) for layer in layers}
  if choices := {layer: list(map(sum, by_expert[layer])) for layer in sorted(by_expert)}:
    found.append(verdict.experts(choices, sum(load.steps for load in loads)))
  ranks = {layer: list(filter(log_directory.is_dropped, names)) for layer, names in record.layers.items()}
  metric = log_directory.moe_metric
  if shares := {layer: fmean(mean(metric(layer, rank)) for rank in of) for layer, of in ranks.items() if of}:
    found.append(verdict.dropped(shares))
  found.append(verdict.waiting(mean('input_wait_share')))
  return [finding for finding in found if finding]


def _points(lines: Sequence[dict], name: str) -> Points:
  return [(line['step'], y) for line in lines if (y := number(line.get(name))) is not None]


def _list(found: Sequence[Judgement]) -> Html:
  items = []
  for kind, headline, said, advice in found:
    tried = [' Try ', tag('em', advice), '.'] if advice else []
    items.append(tag('li', tag('strong', f'{headline}.'), ' ', said, *tried, class_=kind))
  return tag('ul', *items, class_='verdict')
