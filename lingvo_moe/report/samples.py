"""Section of a report with samples: translations beside source and reference, or texts of a language model."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_moe.corpora import text
from lingvo_moe.report import figures
from lingvo_moe.report import languages
from lingvo_moe.report import reading
from lingvo_moe.report.markup import Markup
from lingvo_moe.report.markup import join
from lingvo_moe.report.markup import tag
from lingvo_moe.report.reading import RunRecord
from lingvo_moe.report.series import chosen

_PAIRS = 24  # of which lines are shown, at most
_LINES = 2  # of each
_LENGTH = 300  # characters of a line


def section(records: Sequence[RunRecord]) -> Markup:
  """Samples of every run, or sentences on why there are none."""
  parts = []
  for record in records:
    if not record.scores and not (record.perplexities and record.perplexities[1].get('samples')):
      parts.append(figures.absent(f'{record.name} has no samples: none were decoded of {record.split}.'))
    elif not record.scores:
      summary = record.perplexities[1]
      settings = summary.get('settings')
      prompt = settings.get('prompt') if isinstance(settings, dict) else None
      after = f' after {str(prompt)[:_LENGTH]!r}' if prompt else ''
      parts += [tag('h3', f'Texts of {record.name}{after}'), *map(_text, summary['samples'])]
  scored = [record for record in records if record.scores]
  if scored:
    parts.append(_translations(scored))
  return join(parts)


def _translations(records: Sequence[RunRecord]) -> Markup:
  """Lines evenly spaced in the files of languages that are evenly spaced by size."""
  names, _ = languages.in_order(records, sorted({name for record in records for name in record.scores}))
  other = [name for name in names if reading.differ_in_text(records, name)]
  names = [name for name in names if name not in other]
  shown = [names[i] for i in chosen(len(names), _PAIRS)]
  whole = [record.translations for record in records]
  sentences = [figures.absent(f'Sources and references are not shown. {why}') for found, why in whole if not found]
  if other:
    sentences.append(figures.absent(f'Not shown, as the runs translated different text: {", ".join(other)}.'))
  known = {name: translations for found, _ in reversed(whole) for name, translations in found.items()}
  lines = [
    {name: found[name].lines if name in found else reading.hypotheses(record, name) for name in shown}
    for record, (found, _) in zip(records, whole, strict=True)
  ]
  rows = []
  for name in shown:
    count = min(len(of[name]) for of in lines if of[name]) if any(of[name] for of in lines) else 0
    for i in chosen(count, _LINES + 1)[:_LINES]:
      translations = [of[name][i] if i < len(of[name]) else '' for of in lines]
      rows.append(_row(name, i, known.get(name), translations, beside_text=bool(known)))
  head = ['language', 'line', *(['source', 'reference'] if known else []), *(record.name for record in records)]
  if len(records) == 1:
    head[-1] = 'translation'
  note = tag(
    'p', 'Lines are evenly spaced in each file, not chosen by quality; = marks a translation equal to its reference.'
  )
  return join([*sentences, note, figures.table(head, rows, 'Sample translations')])


def _row(name, i, known, translations, beside_text):
  source, _, target = name.partition('-')
  cells = [name, str(i + 1)]
  reference = None
  if known is not None:
    source, target = known.pair.source, known.pair.target
    reference = known.references[i]
    cells += [_said(known.sources[i], source), _said(reference, target)]
  elif beside_text:
    cells += ['', '']
  for line in translations:
    cells.append(_said(line, target, mark='= ' if line == reference else ''))
  return cells


def _said(line: str, language: str, mark: str = '') -> Markup:
  """A cell with a line of text in a language, in the direction of its script."""
  return tag('td', mark, text.shortened(line, _LENGTH), lang=language, dir='auto')


def _text(sample) -> Markup:
  return tag('blockquote', str(sample)[: 5 * _LENGTH], dir='auto')
