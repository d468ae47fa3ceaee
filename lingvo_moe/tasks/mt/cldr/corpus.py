"""The embedded default corpus: phrases of CLDR's languages and their English, made out of the Babel package.

Every language says the same phrases (phrases.py) as far as it can (speaker.py), so what is learnt of one
may help another. Sizes follow a power law; the English of dev and test is in no language's training set. The same
recipe gives the same bytes, and a language's files do not depend on which others are made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence

import babel
import tqdm

from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks.mt.cldr.phrases import INVENTORY
from lingvo_moe.tasks.mt.cldr.phrases import Phrases
from lingvo_moe.tasks.mt.cldr.speaker import Speaker
from lingvo_moe.tasks.mt.cldr.speaker import Tree
from lingvo_moe.tasks.mt.cldr.speaker import Unspeakable
from lingvo_moe.tasks.mt.cldr.speaker import script_of

# By number of speakers (first and second language, usual estimates): the sizes are then skewed as real corpora are,
# and only the order counts. The list holds the languages that can say at least a third of the phrases in Babel 2.18,
# less English, what is nearly English as CLDR has it (Nigerian Pidgin, Filipino, Hindi in Latin letters), constructed
# languages but Esperanto, and second standards of one language (Norwegian Nynorsk, Serbian in Latin letters, ...).
LANGUAGES = (
  'zh hi es ar fr bn pt ru id ur de ja mr vi te ha tr yue sw ta pa fa ko th jv it gu am kn yo ps my pl or uk ml '
  'ff_Adlm uz sd ms ne ro nl as az so si km af kk ku el hu sv cs ak tg ti bg he ca sr tk sk ks qu ky '
  'sq da be hr fi no hy mn lo gsw bew ee kab tt scn vec ka lt bs gl kok sl nds lv mk xnr ce brx kea ga et cv sc eo '
  'eu cy ast fur dz szl lij fy lb is ccp br oc to mi fo gd rm kgp hsb yrl dsb chr nqo'
).split()

# What the quickstart learns in minutes: 16 languages of 13 scripts, from 6666 training pairs down to 459, among them
# verb-final, agglutinative and right-to-left ones, so that no two are learnt by the same shortcut.
QUICKSTART_LANGUAGES = 'es ar ru ja te tr sw ko th am el he ka fi hy lo'.split()

DEFAULT_SEED = 1
DEFAULT_MAX_PAIRS = 10000
SPLITS = ('train', 'dev', 'test')
_HELD_OUT = {'dev': 100, 'test': 200}  # lines of each language
_HELD_OUT_PERCENT = {'dev': 3, 'test': 5}  # of all English phrases, by hash
_SPARE = 1.6  # phrases made for a pair of the largest language: no language can say them all
_HEAD = 3  # languages before the first one of the power law, which would else halve at every start
_MANIFEST = 'cldr_corpus.json'
_FORMAT = 1  # raise it when the same seed comes to give other text


@dataclasses.dataclass(frozen=True)
class Phrase:
  """What to say, and how English says it."""

  tree: Tree
  english: str


def train_size(code: str, max_pairs: int = DEFAULT_MAX_PAIRS) -> int:
  """Training pairs of a language: a power law of exponent 1, size(rank) = max_pairs * 4 / (rank + 3)."""
  rank = LANGUAGES.index(code) + 1
  return max(1, max_pairs * (1 + _HEAD) // (rank + _HEAD))


def resolve_languages(names: Iterable[str] | None) -> list[str]:
  """CLDR's codes, in the corpus's order, for codes ('de', ISO 639's 'deu') or English names ('German').

  None is all of them. Raises UserError for a language that the corpus does not have, with the closest names.
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
  """The split a phrase belongs to in every language: a hash of its English letters and digits."""
  letters = ' '.join(''.join(c if c.isalnum() else ' ' for c in english.lower()).split())
  percent = int.from_bytes(hashlib.sha256(letters.encode()).digest()[:8], 'big') % 100
  if percent < _HELD_OUT_PERCENT['dev']:
    return 'dev'
  return 'test' if percent < sum(_HELD_OUT_PERCENT.values()) else 'train'


def make_phrases(seed: int = DEFAULT_SEED, max_pairs: int = DEFAULT_MAX_PAIRS) -> dict[str, list[Phrase]]:
  """Draws the phrases that all languages share, by split; each English text occurs once."""
  wanted = {split: 4 * lines for split, lines in _HELD_OUT.items()}
  wanted['train'] = int(max_pairs * _SPARE) + 1
  phrases = {split: [] for split in SPLITS}
  english = Speaker('en', INVENTORY)
  grammar = Phrases(seed)
  seen = set()
  while any(len(phrases[split]) < wanted[split] for split in SPLITS):
    tree = grammar.draw()
    text = english.say(tree)
    split = split_of(text)
    if 3 <= len(text.split()) <= 25 and text not in seen and len(phrases[split]) < wanted[split]:
      phrases[split].append(Phrase(tree, text))
    seen.add(text)
  return phrases


def translate(code: str, phrases: dict[str, list[Phrase]], num_train: int) -> dict[str, list[tuple[str, str]]]:
  """Says the phrases in one language: split -> (source, English) pairs, fewer than asked if it lacks the words.

  Left out: what the language cannot say, what comes out half English, and a source that another English has.
  """
  speaker = Speaker(code, INVENTORY)
  wanted = dict(_HELD_OUT, train=num_train)
  pairs = {}
  said = set()
  for split in ('test', 'dev', 'train'):
    pairs[split] = []
    candidates = phrases[split]
    if split == 'train':
      # Languages start at different phrases, so that small ones do not all know the same few.
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
  """Whether half the English words, or most of the words and numbers, stand in the source already."""
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
  """Writes <out_dir>/<code>-en/{train,dev,test}.{<code>,en}, all or nothing.

  Args:
    out_dir: a new or empty directory, or one that this function made, whose languages it then replaces.
    languages: codes or names; None for all of LANGUAGES.
    seed: gives other phrases.
    max_pairs: training pairs of the largest language, zh; the rest follow `train_size`.
    overwrite: write also beside files that are not this function's. No such file is ever replaced or removed.
    progress: show a progress bar.

  Returns:
    What is also written to <out_dir>/cldr_corpus.json: the recipe, and name, script and pairs of each language.

  Raises:
    UserError: for an unknown language, impossible sizes, or an out_dir that holds something else.
  """
  codes = resolve_languages(languages)
  recipe = _recipe(codes, seed, max_pairs)
  old = _check_writable(out_dir, overwrite)
  _check_nothing_foreign(out_dir, sorted({*codes, *(old['languages'] if old else ())}))
  english = babel.Locale('en')
  phrases = make_phrases(seed, max_pairs)
  summary = {}
  with _temporary_beside(out_dir) as temporary:
    new_dir = os.path.join(temporary, 'corpus')
    os.mkdir(new_dir)
    for code in tqdm.tqdm(codes, desc='languages', unit='', disable=not progress):
      pairs = translate(code, phrases, train_size(code, max_pairs))
      _write(os.path.join(new_dir, f'{code}-en'), code, pairs)
      script = script_of(code)
      summary[code] = {
        'name': english.languages.get(code.split('_')[0], code),
        'script': {'Hans': 'Han', 'Hant': 'Han'}.get(script) or english.scripts.get(script, script),
      }
      summary[code].update({split: len(pairs[split]) for split in SPLITS})
    manifest = {'recipe': recipe, 'languages': summary}
    with open(os.path.join(new_dir, _MANIFEST), 'w', encoding='utf-8') as f:
      f.write(json.dumps(manifest, indent=1) + '\n')
    _move(new_dir, out_dir, old)
  return manifest


def ensure_corpus(
  out_dir: str, languages: Sequence[str] | None = None, seed: int = DEFAULT_SEED, max_pairs: int = DEFAULT_MAX_PAIRS
) -> str:
  """Makes the corpus in out_dir unless it is there already, of the same recipe; returns out_dir."""
  manifest = _manifest(out_dir)
  if not manifest or manifest['recipe'] != _recipe(resolve_languages(languages), seed, max_pairs):
    make_corpus(out_dir, languages, seed, max_pairs)
  return out_dir


def table(manifest: dict) -> str:
  """The languages of a corpus, one line each, and their sum."""
  languages = manifest['languages']
  lines = [f'{"code":8} {"language":20} {"script":16} {"train":>6} {"dev":>5} {"test":>5}']
  for code, row in languages.items():
    lines.append(f'{code:8} {row["name"]:20} {row["script"]:16} {row["train"]:6} {row["dev"]:5} {row["test"]:5}')
  sums = [sum(row[split] for row in languages.values()) for split in SPLITS]
  scripts = len({row['script'] for row in languages.values()})
  lines.append(
    f'{"":8} {len(languages):>3} languages        {scripts:>3} scripts      {sums[0]:6} {sums[1]:5} {sums[2]:5}'
  )
  return '\n'.join(lines)


def _recipe(codes: Sequence[str], seed: int, max_pairs: int) -> dict:
  if max_pairs < 1:
    raise UserError(f'max_pairs={max_pairs}: the largest language needs at least 1 training pair')
  return {
    'made_by': 'make_cldr_corpus',
    'format': _FORMAT,
    'babel': babel.__version__,
    'seed': seed,
    'max_pairs': max_pairs,
    'languages': list(codes),
  }


def _manifest(out_dir: str) -> dict | None:
  """What _write left in out_dir, or None where it is not ours."""
  try:
    with open(os.path.join(out_dir, _MANIFEST), encoding='utf-8') as f:
      manifest = json.load(f)
    return manifest if manifest['recipe']['made_by'] == 'make_cldr_corpus' else None
  except (OSError, ValueError, KeyError, TypeError):
    return None


def _check_writable(out_dir: str, overwrite: bool) -> dict | None:
  """Refuses to write among foreign files; returns the manifest of the corpus that is there, if any."""
  if os.path.exists(out_dir) and not os.path.isdir(out_dir):
    raise UserError(f'out_dir={out_dir} is a file: name a directory')
  old = _manifest(out_dir)
  found = sorted(os.listdir(out_dir)) if os.path.isdir(out_dir) else []
  if found and not old and not overwrite:
    raise UserError(
      f'out_dir={out_dir} holds what this command did not make ({", ".join(found[:3])}'
      f'{", ..." if len(found) > 3 else ""}): name an empty directory, or say --overwrite to write beside it'
    )
  return old


def _check_nothing_foreign(out_dir: str, codes: Sequence[str]) -> None:
  """Refuses to replace <code>-en directories that hold more than this command writes there."""
  for code in codes:
    folder = os.path.join(out_dir, f'{code}-en')
    ours = {f'{split}.{extension}' for split in SPLITS for extension in (code, 'en')}
    foreign = sorted(set(os.listdir(folder)) - ours) if os.path.isdir(folder) else []
    if foreign:
      raise UserError(
        f'{folder} is to be replaced, but holds {", ".join(foreign[:3])}, which this command did not make: '
        'move that away, or name an empty directory'
      )


def _temporary_beside(out_dir: str) -> tempfile.TemporaryDirectory:
  parent = os.path.dirname(os.path.abspath(out_dir))
  try:
    os.makedirs(parent, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix='.cldr_corpus.', dir=parent)
  except OSError as e:
    raise UserError(f'out_dir={out_dir} cannot be made in {parent} ({e.strerror}): name a writable place') from e


def _write(directory: str, code: str, pairs: dict[str, list[tuple[str, str]]]) -> None:
  os.mkdir(directory)
  for split in SPLITS:
    for side, extension in enumerate((code, 'en')):
      with open(os.path.join(directory, f'{split}.{extension}'), 'w', encoding='utf-8', newline='\n') as f:
        f.writelines(pair[side] + '\n' for pair in pairs[split])


def _move(new_dir: str, out_dir: str, old: dict | None) -> None:
  """Puts a finished corpus in its place: by one rename if there is nothing, else language by language."""
  try:
    os.rename(new_dir, out_dir)
    return
  except OSError:
    if not os.path.isdir(out_dir):
      raise
  stale = [f'{code}-en' for code in old['languages']] if old else []
  for name in sorted(set(stale + os.listdir(new_dir))):
    path = os.path.join(out_dir, name)
    if name != _MANIFEST and os.path.isdir(path):
      shutil.rmtree(path)
  for name in sorted(os.listdir(new_dir), key=lambda name: name == _MANIFEST):  # the manifest comes last
    os.replace(os.path.join(new_dir, name), os.path.join(out_dir, name))
