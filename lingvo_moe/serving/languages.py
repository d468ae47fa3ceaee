"""Languages of a run: which pairs it has, by codes and names, and the tag of each target."""

from __future__ import annotations

from typing import Any

import babel

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.text_model import TextModel


class Languages:
  """Languages of a run.

  Where neither its log nor a corpus says which there are, any source is taken, as the model does not read the source's
  code.

  Attributes:
    listed: each language, with its name in English and the languages that it is translated into, as LibreTranslate has
      it.
  """

  def __init__(self, run: TextModel):
    self._run = run
    pairs, names = run.pairs(), babel.Locale('en').languages
    self._known = {'source': {source for source, _ in pairs}, 'target': {target for _, target in pairs}}
    self.listed: list[dict[str, Any]] = [
      {'code': code, 'name': names.get(code, code), 'targets': [target for source, target in pairs if source == code]}
      for code in sorted(self._known['source'] | self._known['target'])
    ]
    try:
      run.choose_target(None)
      self._must_choose = False
    except UserError:
      self._must_choose = True

  def choose(self, source: str | None, target: str | None) -> str | None:
    """Target to pass to TextModel.answer; UserError names the languages there are."""
    for role, code in (('source', source), ('target', target)):
      if code is not None and self._known[role] and code not in self._known[role]:
        known = ', '.join(sorted(self._known[role]))
        raise UserError(f'{code:.40} is not a {role} language of this model; it has {known}')
    if self._must_choose and target is None:
      known = ', '.join(sorted(self._known['target'])) or 'none that is known'
      raise UserError(f'target must be given; one of {known}')
    return self._run.choose_target(target if self._must_choose else None)
