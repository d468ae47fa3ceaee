"""Page of a report: its head, what it says first, its sections, and the style sheet."""

import importlib.resources
import os
import statistics
from collections.abc import Sequence

from lingvo_moe.addons.report import (
  experts_section,
  figures,
  languages_section,
  reading,
  samples_section,
  setup_section,
  training_section,
  verdict_section,
)
from lingvo_moe.addons.report.escaped_html import Html, allowed, tag
from lingvo_moe.addons.report.reading import RunRecord
from lingvo_moe.addons.report.series import text
from lingvo_moe.core.errors import UserError, plural
from lingvo_moe.core.progress import duration
from lingvo_moe.core.quality import METRICS
from lingvo_moe.storage import files, log_directory
from lingvo_moe.storage.log_directory import number, tokens_so_far

_FOLDER = importlib.resources.files(__package__)
_STYLE, _SCRIPT = (_FOLDER.joinpath(f'report.{end}').read_text(encoding='utf-8') for end in ('css', 'js'))

# The page loads nothing, and runs its own script alone, whatever a run has put into it.
_POLICY = (
  f"default-src 'none'; style-src {allowed(_STYLE)}; script-src {allowed(_SCRIPT)}; base-uri 'none'; form-action 'none'"
)


def write(runs: Sequence[str], split: str, data_dir: str | None = None, out: str | None = None) -> tuple[str, int]:
  """Writes the report on some runs, given by log directories; returns the path of the file and its bytes.

  Scores and samples are of `split`, with the text of the corpus data_dir, or without it the text beside the
  translations. The file is `out`, by default report.html in the first log directory.
  """
  records = reading.read(runs, split, data_dir)
  out = out or os.path.join(records[0].run.path, log_directory.REPORT)
  if files.isdir(out):
    raise UserError(
      f'--out is the file to write; {out} is a directory: give a name such as {out.rstrip("/")}/report.html'
    )
  if files.isfile(out) and not files.read(out, 15).lower().startswith(b'<!doctype html>'):
    raise UserError(f'a report replaces reports only; {out} is another file: choose another --out')
  data = page(records).encode()
  try:
    files.write(out, data)
  except OSError as e:
    raise UserError(f'cannot write {out} ({e.strerror}): choose another file with --out=FILE') from None
  return out, len(data)


def page(records: Sequence[RunRecord]) -> str:
  *names, last = (record.name for record in records)
  title = f'{", ".join(names)} and {last}' if names else last
  links = tag('ul', *(tag('li', tag('a', name, href=f'#{key}')) for key, (name, _) in _SECTIONS.items()))
  sections = [
    tag('section', tag('h2', name, id=f'{key}-title'), make(records), id=key, aria_labelledby=f'{key}-title')
    for key, (name, make) in _SECTIONS.items()
  ]
  body = [
    tag('a', 'Skip to the content', href='#content', class_='skip'),
    tag('header', tag('h1', f'Report on {title}'), tag('nav', links, aria_label='Sections')),
    tag('main', *sections, id='content', tabindex='-1'),
    Html(f'<script>{_SCRIPT}</script>'),
  ]
  # Curves have the colours of Okabe and Ito, with more contrast where a background needs it. Those of heat maps go from
  # blue over a neutral one at a fair share to orange; an unused expert has one of its own.
  head = [
    tag('meta', charset='utf-8'),
    tag('meta', http_equiv='Content-Security-Policy', content=_POLICY),
    tag('meta', name='viewport', content='width=device-width, initial-scale=1'),
    tag('meta', name='color-scheme', content='light dark'),
    tag('title', f'Report on {title}'),
    Html(f'<style>{_STYLE}</style>'),
  ]
  whole = tag('html', tag('head', *head), tag('body', *body), lang='en')
  return f'<!DOCTYPE html>\n{whole}\n'


def _summary(records: Sequence[RunRecord]) -> Html:
  """Summary table: model, steps, scores and times."""
  columns = [_facts(record) for record in records]
  rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
  head = ['', *(record.name for record in records)]
  return figures.table(head, [row for row in rows if any(row[1:])], 'Summary')


def _facts(record: RunRecord) -> dict[str, str]:
  steps, best = record.steps, record.best
  last = steps[-1] if steps else {}
  paces = [y for line in steps if (y := number(line.get('tokens_per_second')))]
  seconds = number(record.log[-1].get('seconds_so_far')) if record.log else None
  tokens = tokens_so_far(record.log[-1]) if record.log else 0
  mean = lambda key: [y for scores in record.scores.values() if (y := number(scores.get(key))) is not None]
  languages = plural(len(record.scores), 'language')
  scored = f' over {languages} of {record.split} at step {record.decoded_step}'
  end = record.run.finished
  ended = f'ended at step {end.get("step")} ({end.get("reason")})' if end else 'not ended, or ended by force'
  return {
    'model': record.run.model,
    'training': f'none: the average of {record.averaged}' if record.averaged else ended,
    'last step logged': text(number(last.get('step'))),
    'training loss': text(number(last.get('loss'))),
    'best dev loss': f'{text(best[0])} at step {text(best[1])}' if best else '',
    'dev text, by hash': '' if record.alone else str(record.dev_text or ''),
    **{
      f'mean {metric.title}': f'{statistics.mean(scores):.1f}{scored}' if (scores := mean(name)) else ''
      for name, metric in METRICS.items()
    },
    'tokens a second': f'{text(round(statistics.median(paces)))} (median)' if paces else '',
    'time, evaluations included': duration(seconds) if seconds is not None else '',
    'tokens': text(tokens) if tokens else '',
    'MoE layers': str(len(record.layers) or ''),
  }


_SECTIONS = {
  'verdict': ('Verdict', verdict_section.section),
  'summary': ('Summary', _summary),
  'samples': ('Samples', samples_section.section),
  'languages': ('Languages', languages_section.section),
  'training': ('Training', training_section.section),
  'experts': ('Experts', experts_section.section),
  'setup': ('Configuration and machine', setup_section.section),
}
