"""Page of a report: its head, what it says first, its sections, and the style sheet."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

from lingvo_moe.core import files
from lingvo_moe.core import log_directory
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.errors import counted
from lingvo_moe.core.log_directory import number
from lingvo_moe.core.log_directory import tokens_so_far
from lingvo_moe.core.progress import duration
from lingvo_moe.report import experts
from lingvo_moe.report import figures
from lingvo_moe.report import languages
from lingvo_moe.report import reading
from lingvo_moe.report import samples
from lingvo_moe.report import setup
from lingvo_moe.report import training
from lingvo_moe.report.markup import Markup
from lingvo_moe.report.markup import tag
from lingvo_moe.report.reading import RunRecord
from lingvo_moe.report.series import text

_SECTIONS = {
  'training': ('Training', training.section),
  'languages': ('Languages', languages.section),
  'experts': ('Experts', experts.section),
  'samples': ('Samples', samples.section),
  'setup': ('Configuration and machine', setup.section),
}

# The page may load nothing and run nothing, whatever a run has put into it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write(runs: Sequence[str], split: str, data_dir: str | None = None, out: str | None = None) -> tuple[str, int]:
  """Writes the report on one run or two; returns the path of the file and its bytes.

  Args:
    runs: log directories.
    split: held-out set of scores and samples.
    data_dir: corpus that was decoded; None: text beside the translations.
    out: file to write; None: report.html in the first log directory.
  """
  records = reading.read_all(runs, split, data_dir)
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
  """The report as HTML."""
  title = ' and '.join(record.name for record in records)
  links = tag('ul', *(tag('li', tag('a', name, href=f'#{key}')) for key, (name, _) in _SECTIONS.items()))
  sections = [
    tag('section', tag('h2', name, id=f'{key}-title'), make(records), id=key, aria_labelledby=f'{key}-title')
    for key, (name, make) in _SECTIONS.items()
  ]
  body = [
    tag('a', 'Skip to the content', href='#content', class_='skip'),
    tag('header', tag('h1', f'Report on {title}'), tag('nav', links, aria_label='Sections')),
    tag('main', _summary(records), *sections, id='content', tabindex='-1'),
  ]
  head = [
    tag('meta', charset='utf-8'),
    tag('meta', http_equiv='Content-Security-Policy', content=_POLICY),
    tag('meta', name='viewport', content='width=device-width, initial-scale=1'),
    tag('meta', name='color-scheme', content='light dark'),
    tag('title', f'Report on {title}'),
    Markup(f'<style>{_STYLE}</style>'),
  ]
  whole = tag('html', tag('head', *head), tag('body', *body), lang='en')
  return f'<!DOCTYPE html>\n{whole}\n'


def _summary(records: Sequence[RunRecord]) -> Markup:
  """What one asks first of a run."""
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
  mean = lambda key: [y for of in record.scores.values() if (y := number(of.get(key))) is not None]
  languages = counted(len(record.scores), 'language')
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
    'mean BLEU': f'{statistics.mean(mean("bleu")):.1f}{scored}' if mean('bleu') else '',
    'mean chrF': f'{statistics.mean(mean("chrf")):.1f}{scored}' if mean('chrf') else '',
    'tokens a second': f'{text(round(statistics.median(paces)))} (median)' if paces else '',
    'time, evaluations included': duration(seconds) if seconds is not None else '',
    'tokens': text(tokens) if tokens else '',
    'MoE layers': str(len(record.layers) or ''),
  }


# Colours of curves are by Okabe and Ito, darker or lighter where the background asks for more contrast. Those of heat
# maps go from blue over a neutral one at a fair share to orange, and an unused expert has one apart.
_STYLE = """
:root{--bg:#fff;--fg:#1b1f24;--soft:#57606a;--line:#d6dae0;--box:#f6f7f9;--link:#0b57b0;
--c0:#0060a8;--c1:#c04a00;--c2:#007a5a;--c3:#a03f7d;--c4:#5b5b5b;--c5:#7a5c00;--c6:#4b3fa8;--c7:#a02020;
--l0:#111;--l1:#08519c;--l2:#4292c6;--l3:#a6cbe6;--l4:#eceff2;--l5:#fdc38d;--l6:#ec7014;--l7:#993404}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e6e9ed;--soft:#a6afb9;--line:#3a414a;--box:#1d2126;
--link:#7db8ff;--c0:#5ab4f5;--c1:#ff9a4d;--c2:#3fc79a;--c3:#e08cc4;--c4:#b5b5b5;--c5:#e0c050;--c6:#a99cff;--c7:#ff8080;
--l0:#fff;--l1:#8ec9ff;--l2:#4a90d0;--l3:#2b5a85;--l4:#2b3036;--l5:#7a4a1c;--l6:#d0701a;--l7:#ffc078}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:84rem;background:var(--bg);color:var(--fg);font:1rem/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans',sans-serif}
h1{font-size:1.6rem;overflow-wrap:anywhere}h2{margin-top:2.5rem;border-bottom:1px solid var(--line)}
h3{overflow-wrap:anywhere}a{color:var(--link)}
a:focus-visible,summary:focus-visible,.scroll:focus-visible{outline:3px solid var(--link);outline-offset:2px}
main:focus{outline:none}
.skip{position:absolute;left:-99rem}.skip:focus{position:static}
nav ul,.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1rem}
.legend{font-size:.85rem;margin:.3rem 0}.legend li{overflow-wrap:anywhere}.legend svg{height:.65rem;width:1.6rem}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,24rem),1fr));gap:1rem;align-items:start}
figure{margin:0;padding:.75rem;background:var(--box);border:1px solid var(--line);border-radius:.4rem;min-width:0}
figcaption{font-size:.9rem;color:var(--soft);overflow-wrap:anywhere}figcaption strong{color:var(--fg)}
figure>svg{display:block;width:100%;max-width:36rem;height:auto;margin-top:.4rem}
svg text{font-size:12px;fill:var(--soft)}.end{text-anchor:end}.mid{text-anchor:middle}
path.rule{stroke:var(--line);stroke-width:1;fill:none}
.curve{fill:none;stroke:var(--c);stroke-width:1.8;stroke-linejoin:round}
.marks{fill:none;stroke:var(--c);stroke-width:7;stroke-linecap:round}
.diamonds{fill:var(--bg);stroke:var(--c);stroke-width:1.8}.band{fill:var(--c);opacity:.18;stroke:none}
.d1{stroke-dasharray:6 3}.d2{stroke-dasharray:2 3}.d3{stroke-dasharray:9 3 2 3}.d4{stroke-dasharray:4 4}
details{margin-top:.5rem}summary{cursor:pointer;font-size:.9rem;color:var(--link)}
.scroll{overflow:auto;max-height:28rem;max-width:100%}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.2rem .6rem;border-bottom:1px solid var(--line);text-align:start;vertical-align:top}
thead th{position:sticky;top:0;background:var(--box)}tbody th{font-weight:600}
.absent{color:var(--soft);border-inline-start:3px solid var(--line);padding-inline-start:.7rem}
blockquote{white-space:pre-wrap;margin:1rem 0;padding:.5rem 1rem;background:var(--box);overflow-wrap:anywhere}
@media(max-width:30rem){body{padding:.5rem}figure{padding:.4rem}svg text{font-size:14px}}
@media print{.skip,nav{display:none}figure{break-inside:avoid}}
"""
_STYLE = ''.join(
  [_STYLE, *(f'.c{i}{{--c:var(--c{i})}}' for i in range(8)), *(f'.l{i}{{fill:var(--l{i})}}' for i in range(8))]
)
