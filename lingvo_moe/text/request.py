"""TranslationRequest: what is asked of translations besides their languages and their number."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Self

from lingvo_moe.core.errors import UserError, closest
from lingvo_moe.text import automaton
from lingvo_moe.text.continuations import Sampling
from lingvo_moe.text.visible_text import is_empty

_HALF = re.compile('[\ud800-\udfff]')
SEARCHES = ('beam', 'sample', 'mbr')
SAMPLING = Sampling._fields[:4]  # of translations
SEARCH = {  # fields of a search and their defaults
  'search': 'beam',
  'mbr_samples': 32,
  'sample_temperature': 1.0,
  'top_k': 0,
  'top_p': 1.0,
  'sample_seed': 0,
}


@dataclasses.dataclass(frozen=True)
class TranslationRequest:
  """What is asked of each translation. Lines of equal requests share batches.

  Attributes:
    alignments: whether each has an Alignment.
    prefix: text with which each begins. Its last word may go on, unless a space follows it.
    ban: words or phrases that a translation must not contain, in any case and composition of their letters.
    terms: (word or phrase, its translation): one that is in a source must come translated so. Also a dict, or a list of
      'word=translation'.
    placeholders: whether placeholders, such as {{name}}, are kept from the model and put back in translations; not in
      those with a prefix.
    search: one of SEARCHES: beam search, samples, or those of mbr_samples samples that agree most with the others
      (minimum Bayes risk); None: as configured.
    sample_temperature, top_k, top_p, sample_seed: values of samples; None: as configured.
  """

  alignments: bool = False
  prefix: str = ''
  ban: tuple[str, ...] = ()
  terms: tuple[tuple[str, str], ...] = ()
  placeholders: bool = True
  search: str | None = None
  sample_temperature: float | None = None
  top_k: int | None = None
  top_p: float | None = None
  sample_seed: int | None = None

  def __post_init__(self):
    terms = self.terms.items() if isinstance(self.terms, Mapping) else self.terms
    try:
      terms = [tuple(term.split('=', 1)) if isinstance(term, str) else tuple(term) for term in terms]
      words = [[self.ban] if isinstance(self.ban, str) else list(self.ban), *terms]
      fits = all(isinstance(w, str) and w.strip() for of_one in words for w in of_one) and {*map(len, terms)} <= {2}
    except TypeError:
      fits = False
    if not fits or not isinstance(self.prefix, str):
      raise UserError(
        "prefix is a string, ban has words, terms have a word and its translation, such as 'Hund=hound'; saw "
        f'prefix={self.prefix!r:.60}, ban={self.ban!r:.60}, terms={self.terms!r:.60}'
      )
    object.__setattr__(self, 'ban', tuple(word.strip() for word in words[0]))
    object.__setattr__(self, 'terms', tuple((source.strip(), target.strip()) for source, target in terms))
    for text in (self.prefix, *self.ban, *(word for pair in self.terms for word in pair)):
      if is_half(text):
        raise UserError(f'prefix, ban and terms must be Unicode; saw half of a surrogate pair in {text!r:.60}')
    for word in (*self.ban, *(source for source, _ in self.terms)):
      if not any(c.isalnum() and not is_empty(c) for c in word):
        raise UserError(f'a word that is looked for has a letter or a digit; saw {word!r}: leave it out')
    for word in self.ban:
      for text in (self.prefix, *(target for _, target in self.terms)):
        if automaton.is_barred(word, text):
          raise UserError(
            f'what must not come and what must agree; saw ban={word!r} and {text!r}: leave one of them out'
          )

  @classmethod
  def of(cls, **asked: Any) -> Self:
    """A request, given what is asked by name."""
    names = [field.name for field in dataclasses.fields(cls)]
    for name in asked:
      if name not in names:
        raise UserError(f'a request has {", ".join(names)}; saw {name}: {closest(name, names)}')
    return cls(**asked)

  @property
  def asked(self) -> list[str]:
    """Names of what is asked."""
    return [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]

  @property
  def is_constrained(self) -> bool:
    return bool(self.prefix or self.ban or self.terms)

  def sampling(self, configured: Callable[[str], Any]) -> tuple[str, Sampling | None]:
    """(search, values of samples; None of beam search), given the configured values by name.

    Raises:
      UserError: a value is out of its range, or what is asked does not fit the search.
    """
    search = configured('search') if self.search is None else self.search
    if search not in SEARCHES:
      raise UserError(f'search must be one of {", ".join(SEARCHES)}; saw {search!r:.40}')
    chosen = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
    values = Sampling(*map(configured, SAMPLING)).changed(chosen, search)
    if search != 'beam' and self.is_constrained:
      raise UserError(f'prefix, ban and terms are for beam search; saw search={search}: leave them out, or that')
    return search, None if search == 'beam' else values


def is_half(text: str) -> bool:
  """Whether a text holds half of a surrogate pair, so that it cannot be encoded."""
  return _HALF.search(text) is not None


NOTHING = TranslationRequest()
