"""Section of a report with samples: translations beside source and reference, or texts of a language model."""

from collections.abc import Sequence

from lingvo_moe.addons.report import figures, languages_section, reading
from lingvo_moe.addons.report.escaped_html import Html, join, tag
from lingvo_moe.addons.report.reading import RunRecord
from lingvo_moe.addons.report.series import chosen
from lingvo_moe.corpora import text

_PAIRS = 24  # of which lines are shown, at most
_LINES = 2  # of each
_LENGTH = 300  # characters of a line


def section(records: Sequence[RunRecord]) -> Html:
  """Samples of every run, or sentences on why there are none."""
  scored = [record for record in records if record.scores]
  parts = [part for record in records if record not in scored for part in _texts(record)]
  return join([*parts, _translations(scored) if scored else None])


def _texts(record: RunRecord) -> list[Html]:
  """Texts of a language model, or a sentence on why there are none."""
  _, summary = record.run.perplexities(record.split) or (0, {})
  if not summary.get('samples'):
    return [figures.absent(f'{record.name} has no samples: none were decoded of {record.split}.')]
  settings = summary.get('settings')
  prompt = settings.get('prompt') if isinstance(settings, dict) else None
  after = f' after {str(prompt)[:_LENGTH]!r}' if prompt else ''
  texts = [tag('blockquote', str(sample)[: 5 * _LENGTH], dir='auto') for sample in summary['samples']]
  return [tag('h3', f'Texts of {record.name}{after}'), *texts]


def _translations(records: Sequence[RunRecord]) -> Html:
  """Lines evenly spaced in the files of languages that are evenly spaced by size."""
  names, _ = languages_section.in_order(records, sorted({name for record in records for name in record.scores}))
  other = [name for name in names if reading.differ_in_text(records, name)]
  names = [name for name in names if name not in other]
  names = [names[i] for i in chosen(len(names), _PAIRS)]
  why = [record.translations[1] for record in records if not record.translations[0]]
  sentences = [figures.absent(f'Sources and references are not shown. {reason}') for reason in why]
  if other:
    sentences.append(figures.absent(f'Not shown, as the runs translated different text: {", ".join(other)}.'))
  known = {name: pair for record in reversed(records) for name, pair in record.translations[0].items()}
  rows = []
  for name in names:
    decoded = [reading.hypotheses(record, name) for record in records]
    count = min(map(len, filter(None, decoded)), default=0)
    for i in chosen(count, _LINES + 1)[:_LINES]:
      source, _, target = name.partition('-')
      cells, reference = [name, str(i + 1)], None
      if name in known:
        source, target = known[name].pair.source, known[name].pair.target
        reference = known[name].references[i]
        cells += [_said(known[name].sources[i], source), _said(reference, target)]
      elif known:
        cells += ['', '']
      shown = [lines[i] if i < len(lines) else '' for lines in decoded]
      rows.append([*cells, *(_said(line, target, mark='= ' if line == reference else '') for line in shown)])
  columns = [record.name for record in records] if len(records) > 1 else ['translation']
  head = ['language', 'line', *(['source', 'reference'] if known else []), *columns]
  about = 'Lines are evenly spaced in each file, not chosen by quality; = marks a translation equal to its reference.'
  return join([*sentences, tag('p', about), figures.table(head, rows, 'Sample translations')])


def _said(line: str, language: str, mark: str = '') -> Html:
  """A cell with a line of text in a language, in the direction of its script."""
  return tag('td', mark, text.shortened(line, _LENGTH), lang=language, dir='auto')
