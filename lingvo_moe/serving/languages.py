"""Languages of a run: which pairs it has, by codes and names, and the tag of each target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lingvo_moe.core.errors import UserError
from lingvo_moe.run.loaded import LoadedRun


class Languages:
  """Languages of a run.

  Where neither its log nor a corpus says which there are, any source is taken, as the source is not told to the model.

  Attributes:
    pairs: (source, target), sorted.
    listed: each language, with its name in English and the languages that it is translated into, as LibreTranslate has
      it.
  """

  def __init__(self, run: LoadedRun):
    self._run = run
    self.pairs = run.pairs()
    self.listed = _list(self.pairs)
    try:
      self._default = run.choose_target(None)  # None: the model has one target, and no tags
      self._must_choose = False
    except UserError:
      self._must_choose = True

  def choose(self, source: str | None, target: str | None) -> str | None:
    """Target to pass to LoadedRun.answer; UserError names the languages there are."""
    for role, asked, known in (
      ('source', source, {source for source, _ in self.pairs}),
      ('target', target, {target for _, target in self.pairs}),
    ):
      if asked is not None and known and asked not in known:
        raise UserError(f'{asked:.40} is not a {role} language of this model; it has {_listed(known)}')
    if self._must_choose:
      if target is None:
        raise UserError(f'target must be given; one of {_listed({target for _, target in self.pairs})}')
      return self._run.choose_target(target)
    return self._default


def _list(pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
  names = _names()
  codes = sorted({code for pair in pairs for code in pair})
  targets = lambda code: [target for source, target in pairs if source == code]
  return [{'code': code, 'name': names.get(code, code), 'targets': targets(code)} for code in codes]


def _listed(codes: Iterable[str]) -> str:
  return ', '.join(sorted(codes)) or 'none that is known'


def _names() -> dict[str, str]:
  import babel

  return dict(babel.Locale('en').languages)
