"""Section of a report on how a run was made: its configuration, versions, commit and machine."""

from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_moe.addons.report import figures
from lingvo_moe.addons.report.escaped_html import Html, join, tag
from lingvo_moe.addons.report.reading import RunRecord

_NONE = '(none)'
_APART = ('step', 'examples')  # not shown as an environment


def section(records: Sequence[RunRecord]) -> Html:
  """Section of a report: fields that differ between two runs; environments; every value of the configurations."""
  configured = _rows([{name: repr(value) for name, value in record.run.configured().items()} for record in records])
  parts = []
  if len(records) > 1:
    rows = [row for row in configured if len(set(row[1:])) > 1]
    parts.append(tag('h3', 'What differs in the configurations'))
    parts.append(_table(records, rows, 'What differs') if rows else figures.absent('No value differs.'))
  parts.append(tag('h3', 'Versions, commit and machine'))
  for record in records:
    if not (environments := record.run.environments):
      why = 'it was trained by a version that did not record versions, commit and machine.'
      parts.append(figures.absent(f'{record.name} has no environment.jsonl: {why}'))
    elif len(environments) > 1:
      starts = ', '.join(f'step {e.get("step")}' for e in environments)
      parts.append(tag('p', f'{record.name} was started in several environments ({starts}); the last one is shown.'))
  known = [record for record in records if record.run.environments]
  if known:
    parts.append(_table(known, _rows([_flat(record.run.environments[-1]) for record in known]), 'Environment'))
  values = _table(records, configured, 'Configuration')
  return join([*parts, tag('details', tag('summary', 'All values of the configuration'), values)])


def _rows(columns: Sequence[Mapping[str, str]]) -> list[list[str]]:
  """A row for each name that a column has."""
  names = list(dict.fromkeys(name for column in columns for name in column))
  return [[name, *(column.get(name, _NONE) for column in columns)] for name in names]


def _table(records: Sequence[RunRecord], rows: Sequence[Sequence[str]], name: str) -> Html:
  head = ['name', *(record.name for record in records)] if len(records) > 1 else ['name', 'value']
  return figures.table(head, rows, name)


def _flat(environment: Mapping[str, Any], prefix: str = '') -> dict[str, str]:
  """Nested values by names with spaces between; without what is nothing."""
  flat = {}
  for key, value in environment.items():
    if isinstance(value, dict) and key not in _APART:
      flat |= _flat(value, f'{prefix}{key} ')
    elif key not in _APART and value not in (None, '', [], {}):
      flat[prefix + key] = ', '.join(map(str, value)) if isinstance(value, list) else str(value)
  return flat
