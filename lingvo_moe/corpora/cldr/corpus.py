"""Default corpus: phrases in CLDR's languages with their English, generated from the data in the Babel package.

All languages have the same phrases (phrases.py), except those that a language cannot express (speaker.py), so
languages may help each other in training. Sizes follow a power law; the English of dev and test is in no language's
training set. The same recipe gives the same bytes, and the files of a language do not depend on which others are made.
"""

import contextlib
import difflib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import babel

from lingvo_moe.core import progress as progress_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora.cldr import DATA
from lingvo_moe.corpora.cldr.phrases import INVENTORY, Phrases
from lingvo_moe.corpora.cldr.speaker import Speaker, Tree, Unspeakable, script_of
from lingvo_moe.corpora.parallel import SPLITS
from lingvo_moe.storage import files, json_files, new_folder

LANGUAGES = DATA['corpus']['languages'].split()
QUICKSTART_LANGUAGES = DATA['corpus']['quickstart'].split()
DEFAULT_SEED = 1
DEFAULT_MAX_PAIRS = 10000
_HELD_OUT = {'dev': 100, 'test': 200}  # lines of each language
_HELD_OUT_PERCENT = {'dev': 3, 'test': 5}  # of all English phrases, by hash
_SPARE = 1.6  # phrases generated per training pair of the largest language, as no language can express all of them
_HEAD = 3  # ranks of the power law that are left out, so that the second size is not half the first
_MANIFEST, _MADE_BY = 'cldr_corpus.json', 'make_cldr_corpus'
_FORMAT = 1  # to be increased when a change gives other text for the same seed


class Phrase(NamedTuple):
  """Phrase: its tree, and its English text."""

  tree: Tree
  english: str


def train_size(code: str, max_pairs: int = DEFAULT_MAX_PAIRS) -> int:
  """Number of training pairs of a language, a power law of exponent 1: size(rank) = max_pairs * 4 / (rank + 3)."""
  rank = LANGUAGES.index(code) + 1
  return max(1, max_pairs * (1 + _HEAD) // (rank + _HEAD))


def resolve_languages(names: Iterable[str] | None) -> list[str]:
  """CLDR codes, in the order of LANGUAGES, of languages given as codes ('de', ISO 639's 'deu') or names ('German').

  None gives all languages. Raises UserError, with the closest names, for a language that the corpus lacks.
  """
  if names is None:
    return list(LANGUAGES)
  english = babel.Locale('en').languages
  aliases = babel.core.get_global('language_aliases')
  known = {code.lower(): code for code in LANGUAGES}
  for code in LANGUAGES:
    known[english.get(code, english.get(code.split('_')[0], code)).lower()] = code
  chosen = set()
  for name in names:
    wanted = name.strip().replace('-', '_').lower()
    code = known.get(wanted) or known.get(aliases.get(wanted, ''))
    if not code:
      near = dict.fromkeys(known[match] for match in difflib.get_close_matches(wanted, known, n=4, cutoff=0.4))
      labels = [f'{c} ({english.get(c.split("_")[0], c)})' for c in near]
      raise UserError(
        f"languages are {len(LANGUAGES)} of CLDR's codes, such as de, fr or zh; saw {name.strip()!r}: "
        f'{"closest: " + ", ".join(labels) if labels else "known: " + " ".join(LANGUAGES)}'
      )
    chosen.add(code)
  if not chosen:
    raise UserError("no language is named: give codes such as 'de,fr', or leave the flag out for all of them")
  return [code for code in LANGUAGES if code in chosen]


def split_of(english: str) -> str:
  """Split of a phrase in all languages, by a hash of its English letters and digits."""
  letters = ' '.join(''.join(c if c.isalnum() else ' ' for c in english.lower()).split())
  percent = int.from_bytes(hashlib.sha256(letters.encode()).digest()[:8], 'big') % 100
  if percent < _HELD_OUT_PERCENT['dev']:
    return 'dev'
  return 'test' if percent < sum(_HELD_OUT_PERCENT.values()) else 'train'


def make_phrases(seed: int = DEFAULT_SEED, max_pairs: int = DEFAULT_MAX_PAIRS) -> dict[str, list[Phrase]]:
  """Draws the phrases for all languages, by split; each English text occurs once."""
  wanted = {split: 4 * lines for split, lines in _HELD_OUT.items()}
  wanted['train'] = int(max_pairs * _SPARE) + 1
  phrases = {split: [] for split in SPLITS}
  english, grammar, seen = Speaker('en', INVENTORY), Phrases(seed), set()
  while any(len(phrases[split]) < wanted[split] for split in SPLITS):
    tree = grammar.draw()
    text = english.say(tree)
    split = split_of(text)
    if 3 <= len(text.split()) <= 25 and text not in seen and len(phrases[split]) < wanted[split]:
      phrases[split].append(Phrase(tree, text))
    seen.add(text)
  return phrases


def translate(code: str, phrases: dict[str, list[Phrase]], num_train: int) -> dict[str, list[tuple[str, str]]]:
  """Translates phrases to one language: (source, English) pairs by split, fewer than wanted if many are left out.

  Phrases are left out if the language cannot express them, if their source is half English, or if it is the source of
  another English text too.
  """
  speaker = Speaker(code, INVENTORY)
  wanted = dict(_HELD_OUT, train=num_train)
  pairs = {}
  said = set()
  for split in ('test', 'dev', 'train'):
    pairs[split] = []
    candidates = phrases[split]
    if split == 'train':
      # Languages start at different phrases, so that small ones do not all have the same few.
      start = int.from_bytes(hashlib.sha256(code.encode()).digest()[:8], 'big') % len(candidates)
      candidates = candidates[start:] + candidates[:start]
    for phrase in candidates:
      if len(pairs[split]) == wanted[split]:
        break
      with contextlib.suppress(Unspeakable):
        source = speaker.say(phrase.tree)
        if source not in said and not _half_english(source, phrase.english):
          pairs[split].append((source, phrase.english))
          said.add(source)
  return pairs


def _half_english(source: str, english: str) -> bool:
  """True if at least half of the English words, or 60% of its words and numbers, are in the source too."""
  for pattern, most in ((r'[^\W\d]+', 0.5), (r'\w+', 0.6)):
    words = set(re.findall(pattern, english.lower()))
    if len(words & set(re.findall(pattern, source.lower()))) >= most * len(words):
      return True
  return False


def make_corpus(
  out_dir: str,
  languages: Sequence[str] | None = None,
  seed: int = DEFAULT_SEED,
  max_pairs: int = DEFAULT_MAX_PAIRS,
  overwrite: bool = False,
  progress: bool = True,
) -> dict:
  """Writes the corpus, <out_dir>/<code>-en/{train,dev,test}.{<code>,en}; after an error nothing is written.

  Args:
    out_dir: a new or empty directory, or one that this function made, whose languages are then replaced.
    languages: codes or names; None for all of LANGUAGES.
    seed: seed of the phrases.
    max_pairs: training pairs of the largest language, zh; the others follow `train_size`.
    overwrite: True to write to a directory with other files too. Such files are never replaced or removed.
    progress: True to show a progress bar.

  Returns:
    The manifest, also written to <out_dir>/cldr_corpus.json: the recipe, and name, script and number of pairs of each
    language.

  Raises:
    UserError: an unknown language, impossible sizes, or an out_dir with other files.
  """
  codes = resolve_languages(languages)
  if max_pairs < 1:
    raise UserError(f'max_pairs={max_pairs}: the largest language needs at least 1 training pair')
  replaced = _check_writable(out_dir, codes, overwrite)
  english = babel.Locale('en')
  phrases = make_phrases(seed, max_pairs)
  summary = {}
  has_others = bool({*_listed(out_dir)} - {_MANIFEST, *(f'{code}-en' for code in replaced)})
  place = os.path.join(out_dir, '.new_corpus') if has_others else out_dir
  with new_folder.writing(place, replace=True) as new_dir:
    for code in progress_lib.over(codes, 'language') if progress else codes:
      pairs = translate(code, phrases, train_size(code, max_pairs))
      _write(os.path.join(new_dir, f'{code}-en'), code, pairs)
      script = script_of(code)
      summary[code] = {
        'name': english.languages.get(code.split('_')[0], code),
        'script': {'Hans': 'Han', 'Hant': 'Han'}.get(script) or english.scripts.get(script, script),
        **{split: len(pairs[split]) for split in SPLITS},
      }
    recipe = {'made_by': _MADE_BY, 'format': _FORMAT, 'babel': babel.__version__, 'seed': seed}
    recipe |= {'max_pairs': max_pairs, 'languages': codes}
    manifest = {'recipe': recipe, 'languages': summary}
    files.write(os.path.join(new_dir, _MANIFEST), json.dumps(manifest, indent=1) + '\n')
  if has_others:
    _spread(place, out_dir, {**replaced, **summary})
  return manifest


def table(manifest: dict) -> str:
  """Table of the languages of a corpus, with their sums."""
  languages = manifest['languages']
  rows = [(code, *(language[key] for key in ('name', 'script', *SPLITS))) for code, language in languages.items()]
  names, scripts, *sizes = list(zip(*rows))[1:]
  sums = '', f'{len(names):>3} languages', f'{len({*scripts}):>3} scripts', *map(sum, sizes)
  form = '{:8} {:20} {:16} {:>6} {:>5} {:>5}'.format
  return '\n'.join(form(*row) for row in [('code', 'language', 'script', *SPLITS), *rows, sums])


_KINDS = {'recipe': json_files.OBJECT, 'languages': json_files.by_name(json_files.OBJECT)}


def _manifest(out_dir: str) -> dict | None:
  """Manifest in out_dir; None if there is none, or one of another program."""
  try:
    manifest = json_files.read(os.path.join(out_dir, _MANIFEST), 'a manifest', 'remove it', **_KINDS)
  except (OSError, UserError):
    return None
  return manifest if manifest['recipe'].get('made_by') == _MADE_BY else None


def _listed(folder: str) -> list[str]:
  return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _check_writable(out_dir: str, codes: Sequence[str], overwrite: bool) -> dict[str, dict]:
  """The languages in out_dir that will be replaced, by code; UserError if other files are in the way."""
  if os.path.exists(out_dir) and not os.path.isdir(out_dir):
    raise UserError(f'out_dir={out_dir} is a file: name a directory')
  manifest, names = _manifest(out_dir), _listed(out_dir)
  if names and not manifest and not overwrite:
    raise UserError(
      f'out_dir={out_dir} holds what this command did not make ({", ".join(names[:3])}'
      f'{", ..." if len(names) > 3 else ""}): name an empty directory, or say --overwrite to write beside it'
    )
  replaced = manifest['languages'] if manifest else {}
  for code in sorted({*codes, *replaced}):
    folder = os.path.join(out_dir, f'{code}-en')
    if foreign := sorted(
      {*_listed(folder)} - {f'{split}.{extension}' for split in SPLITS for extension in (code, 'en')}
    ):
      raise UserError(
        f'{folder} is to be replaced, but holds {", ".join(foreign[:3])}, which this command did not make: '
        'move that away, or name an empty directory'
      )
  return replaced


def _write(directory: str, code: str, pairs: dict[str, list[tuple[str, str]]]) -> None:
  os.mkdir(directory)
  for split in SPLITS:
    for side, extension in enumerate((code, 'en')):
      with open(os.path.join(directory, f'{split}.{extension}'), 'w', encoding='utf-8', newline='\n') as f:
        f.writelines(pair[side] + '\n' for pair in pairs[split])


def _spread(new_dir: str, out_dir: str, replaced: dict) -> None:
  """Moves a finished corpus beside other files, language by language; meanwhile the manifest is that of no recipe."""
  unfinished = {'recipe': {'made_by': _MADE_BY, 'unfinished': True}, 'languages': replaced}
  files.write(os.path.join(out_dir, _MANIFEST), json.dumps(unfinished))
  for code in replaced:
    shutil.rmtree(os.path.join(out_dir, f'{code}-en'), ignore_errors=True)
  for name in sorted(os.listdir(new_dir), key=lambda name: name == _MANIFEST):  # the manifest comes last
    os.replace(os.path.join(new_dir, name), os.path.join(out_dir, name))
  os.rmdir(new_dir)
