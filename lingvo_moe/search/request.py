"""TranslationRequest: what is asked of translations besides their languages and their number."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Self

from lingvo_moe.core.errors import UserError, closest, shown
from lingvo_moe.core.visible_text import is_empty
from lingvo_moe.search import automaton, repetition
from lingvo_moe.search.beam import EARLY_STOPPING
from lingvo_moe.search.continuations import Sampling
from lingvo_moe.storage.json_files import INTEGER, NUMBER, between, one_of

GREEDY = {'beam_size': 1, 'early_stopping': 'first'}
_HALF = re.compile('[\ud800-\udfff]')
SEARCHES = ('beam', 'greedy', 'sample', 'mbr')
SAMPLING = Sampling._fields[:4]  # of translations
SEARCH = {  # fields of a search and their defaults
  'search': 'beam',
  'mbr_samples': 32,
  'sample_temperature': 1.0,
  'top_k': 0,
  'top_p': 1.0,
  'sample_seed': 0,
}

BEAM = {  # fields of beam search, and of limits, that may be asked of one request where no graph fixes them
  'beam_size': between(INTEGER, 1, 1024),
  'length_norm_alpha': between(NUMBER, 0, 1e6),
  'early_stopping': one_of(*EARLY_STOPPING),
  'decode_ratio': between(NUMBER, 0, 1000),
  'decode_extra': between(INTEGER, 0, 10**6),
  'repetition_penalty': between(NUMBER, 1e-6, repetition.MOST[0]),
  'no_repeat_ngram_size': between(INTEGER, 0, repetition.MOST[1]),
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
    search: one of SEARCHES: beam search; greedy search, which is that with a beam of 1 and early_stopping='first';
      samples, or those of mbr_samples samples that agree most with the others (minimum Bayes risk); None: as
      configured.
    sample_temperature, top_k, top_p, sample_seed: values of samples; None: as configured.
    beam_size, length_norm_alpha, early_stopping: values of beam search; None: as configured.
    decode_ratio, decode_extra: limits of a translation's length; None: as configured.
    repetition_penalty, no_repeat_ngram_size: limits on the repetition of symbols; None: as configured.
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
  beam_size: int | None = None
  length_norm_alpha: float | None = None
  early_stopping: str | None = None
  decode_ratio: float | None = None
  decode_extra: int | None = None
  repetition_penalty: float | None = None
  no_repeat_ngram_size: int | None = None

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
    for name, kind in BEAM.items():
      if (value := getattr(self, name)) is not None and not kind.fits(value):
        raise UserError(f'{name} must be {kind.name}; saw {shown(value):.60}')
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

  def value(self, name: str, configured: Callable[[str], Any]) -> Any:
    """Value of a field that may be asked, or else the configured one; greedy search has those of its beam."""
    search = configured('search') if self.search is None else self.search
    if search == 'greedy' and name in GREEDY:
      return GREEDY[name]
    return configured(name) if getattr(self, name) is None else getattr(self, name)

  def sampling(self, configured: Callable[[str], Any]) -> tuple[str, Sampling | None]:
    """(search, values of samples; None of beam and greedy search), given the configured values by name.

    Raises:
      UserError: a value is out of its range, or what is asked does not fit the search.
    """
    search = configured('search') if self.search is None else self.search
    if search not in SEARCHES:
      raise UserError(f'search must be one of {", ".join(SEARCHES)}; saw {search!r:.40}')
    chosen = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
    is_beam = search in ('beam', 'greedy')
    values = Sampling(*map(configured, SAMPLING)).changed(chosen, 'beam' if is_beam else search)
    if not is_beam and self.is_constrained:
      raise UserError(f'prefix, ban and terms are for beam search; saw search={search}: leave them out, or that')
    for name in ('beam_size', 'length_norm_alpha', 'early_stopping'):
      if getattr(self, name) is not None and search != 'beam':
        raise UserError(f'{name} is for beam search; saw it with search={search}: leave one of them out')
    return search, None if is_beam else values


def is_half(text: str) -> bool:
  """Whether a text holds half of a surrogate pair, so that it cannot be encoded."""
  return _HALF.search(text) is not None


NOTHING = TranslationRequest()
