"""What the experts of a run have learnt, as a page: their load in training, information on language and token, and a
plot of who serves which language."""

import csv
import math
import os
from collections.abc import Mapping, Sequence

import numpy as np

from lingvo_moe.addons.report.experts_section import fair_shares
from lingvo_moe.addons.report.reading import RunRecord
from lingvo_moe.core.errors import UserError, closest
from lingvo_moe.corpora import text
from lingvo_moe.storage import log_directory
from lingvo_moe.text import markdown
from paper import plots, specialization

_NAME = 'name'  # the column that is no label
_RANKS = (log_directory.dropped(0), log_directory.dropped(1), 'second_skipped')


def load_in_training(record: RunRecord, last_step: int) -> list[str]:
  """Table of the load of experts over the steps up to one: the fullest, dead ones, choices without a slot."""
  spans = [span for span in record.run.loads if span.step <= last_step and record.layers.keys() <= span.choices.keys()]
  lines = [line for line in record.steps if spans and line['step'] <= spans[-1].step]
  if not spans or not lines:
    return [f'{record.name} has no loads of its experts up to step {last_step}.']
  rows = []
  for layer in record.layers:
    shares = fair_shares(np.sum([span.choices[layer] for span in spans], axis=0))
    percent = [
      f'{100 * np.mean([line[key] for line in lines]):.2f}%'
      if (key := log_directory.moe_metric(layer, rank)) in lines[-1]
      else '-'
      for rank in _RANKS
    ]
    rows.append([layer, f'{max(shares):.2f}', f'{shares.count(0)} of {len(shares)}', *percent])
  columns = ['layer', 'largest load over mean', 'dead', *(rank.replace('_', ' choices ') for rank in _RANKS)]
  recorded = sum(span.steps for span in spans)
  return [f'Loads of {record.name}, of {recorded} of the first {spans[-1].step} steps.', markdown.table(columns, rows)]


class Specialization:
  """What experts serve, on held-out text with nothing dropped.

  Args:
    choices: by layer; see specialization.collect.
    languages: in the order of their places.
    num_experts: E.
    about: what is known of each language, by columns such as 'family', and its 'name'; it may lack languages.
  """

  def __init__(
    self,
    choices: Mapping[str, specialization.LayerChoices],
    languages: Sequence[str],
    num_experts: int,
    about: Mapping[str, Mapping[str, str]],
  ) -> None:
    if not choices:
      raise UserError('no token was routed: the model has no experts that choose by token, or the text is empty')
    self._choices = choices
    self._languages = languages
    self._num_experts = num_experts
    self._names = {language: known.get(_NAME, language) for language, known in about.items()}
    self._about = {l: {c: label for c, label in known.items() if c != _NAME} for l, known in about.items()}
    self._told = {name: specialization.information(layer, num_experts) for name, layer in choices.items()}
    self._served = {name: self._served_of(layer) for name, layer in choices.items()}
    self._shares = {name: _shares(served) for name, served in self._served.items()}

  def information(self) -> list[str]:
    """Table of what language and token tell of a token's expert."""
    rows = []
    for name, found in self._told.items():
      parts = [f'{part:.2f} ({100 * part / found.entropy:.0f}%)' if found.entropy else '-' for part in found[1:]]
      rows.append([name, f'{len(self._choices[name].languages):,}', f'{found.entropy:.2f}', *parts])
    about = (
      f'Nats, and shares of the entropy; log {self._num_experts} = {math.log(self._num_experts):.2f} is the entropy '
      'where all experts serve as much. Adjusted for chance: 0 is what shuffled labels give.'
    )
    return [about, markdown.table(['layer', 'tokens', 'H(expert)', 'I(expert; language)', 'I(expert; token)'], rows)]

  def neighbours(self, within: str | None = None) -> list[str]:
    """Table of how often the language with the most similar experts is of the same family or script.

    Args:
      within: a column; the neighbours of a language are those that share it.
    """
    columns = _labels(self._about)
    _check_known('labels', within, columns)
    columns = [column for column in columns if column != within]
    if not columns:
      return []
    rows = []
    for name, layers in {**{n: [n] for n in self._served}, 'all layers': list(self._served)}.items():
      known = [
        place
        for place, language in enumerate(self._languages)
        if language in self._about and all(self._served[n][place].any() for n in layers)
      ]
      if len(known) < 3:
        continue
      labels = {c: [self._about[self._languages[place]].get(c, '') for place in known] for c in (*columns, within)}
      distances = specialization.distances([self._shares[n][known] for n in layers])
      cells = []
      for column in columns:
        found = specialization.same_neighbour(distances, labels[column], labels[within] if within else None)
        percent = f'{100 * found.same:.0f}% ({100 * found.by_chance:.0f}%) of {found.languages}'
        cells.append(percent if found.languages else '-')
      rows.append([name, *cells])
    if not rows:
      return []
    about = (
      f'Languages whose nearest neighbour{f" of the same {within}" if within else ""}, by the experts they use, has '
      'the same label; in brackets a random neighbour. Languages count that have a neighbour of their label.'
    )
    return [about, markdown.table(['layer', *(f'same {column}' for column in columns)], rows)]

  def plot(self, folder: str, layer: str | None = None) -> list[str]:
    """Draws P(expert given language) of the layer in which language tells most, languages by cluster."""
    layer = layer or max(self._told, key=lambda name: self._told[name].language)
    _check_known('layers with experts', layer, list(self._told))
    shares = self._shares[layer]
    by_expert = shares.T + 1e-12  # of a dead expert all languages alike
    by_expert /= by_expert.sum(axis=1, keepdims=True)
    rows, columns = (specialization.order(specialization.distances([p])) for p in (shares, by_expert))
    labels = [self._label(self._languages[place]) for place in rows]
    groups = [next(iter(self._about.get(self._languages[place], {}).values()), '') for place in rows]
    height = max(4.2, 0.125 * len(rows))
    with plots.page(os.path.join(folder, 'experts.png'), width=9, height=height) as (axes,):
      values = 100 * shares[np.ix_(rows, columns)]
      plots.heat_map(axes, values, labels, groups, list(map(str, columns)), '% of the tokens of a language')
      axes.set_xlabel(f'{self._num_experts} experts of {layer}, those that serve similar languages side by side')
    return ['![experts](experts.png)']

  def _served_of(self, choices: specialization.LayerChoices) -> np.ndarray:
    """Tokens of each language that each expert serves, [P, E]."""
    counted = specialization.counts(choices.languages, choices, self._num_experts)
    return np.pad(counted, ((0, len(self._languages) - len(counted)), (0, 0)))

  def _label(self, language: str) -> str:
    return ' · '.join([self._names.get(language, language), *dict.fromkeys(self._about.get(language, {}).values())])


def check_choices(
  record: RunRecord, about: Mapping[str, Mapping[str, str]], within: str | None, layer: str | None
) -> None:
  """Raises UserError for a label or a layer that there is not, before text is routed.

  Args:
    record: of the run; one without logs of its training leaves the layer to Specialization.plot.
    about: see Specialization.
    within: see Specialization.neighbours.
    layer: see Specialization.plot.
  """
  _check_known('labels', within, _labels(about))
  if record.layers:
    _check_known('layers with experts', layer, list(record.layers))


def _labels(about: Mapping[str, Mapping[str, str]]) -> list[str]:
  """Columns of what is known of languages, without their names."""
  return list(dict.fromkeys(column for known in about.values() for column in known if column != _NAME))


def _check_known(what: str, name: str | None, known: Sequence[str]) -> None:
  if name is not None and name not in known:
    raise UserError(f'the {what} are {", ".join(known) or "not given"}; saw {name!r}; {closest(name, known)}')


def _shares(served: np.ndarray) -> np.ndarray:
  """P(expert | language), [P, E]; languages without tokens use all experts alike."""
  served = np.where(served.any(axis=1, keepdims=True), served, 1.0)
  return served / served.sum(axis=1, keepdims=True)


def read_labels(path: str) -> dict[str, dict[str, str]]:
  """What a table says of languages: columns by name for each language, in the order of the file.

  Args:
    path: of a table with tabs between columns and their names in the first line: `language`, perhaps `name`, and
      labels.
  """
  try:
    rows = list(csv.DictReader(text.lines([path]), delimiter='\t', quoting=csv.QUOTE_NONE))
  except csv.Error as e:
    raise UserError(
      f'{path} must be a table with tabs and a line for each language ({e}): mend its line ends'
    ) from None
  if not rows or 'language' not in rows[0]:
    raise UserError(f'{path} must be a table with tabs, whose first line names its columns, one of them language')
  return {row['language']: {k: v for k, v in row.items() if k not in (None, 'language') and v} for row in rows}
