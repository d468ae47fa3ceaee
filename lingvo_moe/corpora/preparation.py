"""Preparation of a corpus: pairs of lines are filtered, and split into train, dev and test that share no sentence.

A pair of lines is dropped, and counted by reason, if a side is not UTF-8, empty, too long or in another language, if
their lengths are wildly unlike, if the same pair, or one much like it, occurred before, or if one side goes with many
others, as boilerplate does. Lengths are in characters. The corpus's own ratio of target to
source characters is the measure of the others: Chinese is a third as long as its English translation, and not to blame.
Sentences are compared by text.key: those that differ in spaces, composition or characters that cannot be seen alone are
the same. What is written is the text as it was.

Dev and test are the pairs with the smallest hashes of seed and text, so that they do not depend on the order of lines.
Pairs whose sentences occur in no other pair come first; they cost training nothing. Where there are too few of them,
others follow, and pairs that share a sentence with those are dropped. In the end no source and no target of dev or
test occurs in train, and none of dev in test.

Files are read twice and never held: a line takes some 50 bytes of memory, in arrays of hashes. These have 64 bits: two
of 10 million sentences get the same hash, and one is lost, in one of 300,000 corpora.
"""

import array
import dataclasses
import enum
import hashlib
import os
import shlex
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lingvo_moe.core import errors
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.progress import Advance
from lingvo_moe.corpora import language_id, near_duplicates, packed, parallel, temperature_sampling, text
from lingvo_moe.corpora.pair_files import Side, Texts
from lingvo_moe.corpora.parallel import SPLITS
from lingvo_moe.storage import new_folder

_CHUNK = 1 << 20  # lines that are computed at a time
_BUCKETS = 16  # parts of all hashes that are sorted at a time
_SLACK = 10  # characters added to both sides of a ratio: 'Ja.' may become 'Yes, indeed.'
_UNDECIDED = 255
_HELD_OUT = 1000  # pairs of dev, and of test, at most, where their number is not given
_FEW, _SHARE = 3, 0.01  # lines, and share of all, that may be of another encoding
_IDENTIFIED_BYTES = 100_000_000  # at some thousand lines a second
_PARTNERS, _SHORT = 20, 20  # of boilerplate: other sides of a sentence of more than so many characters
_MANY_COPIES = 0.1  # share of pairs, from which on the user is told


class LineOutcome(enum.IntEnum):
  """Outcome of a line: a split, or the first reason why it is dropped, with its words."""

  def __new__(cls, value: int, reason: str = ''):
    outcome = int.__new__(cls, value)
    outcome._value_, outcome.reason = value, reason
    return outcome

  TRAIN = 0
  DEV = 1
  TEST = 2
  COLUMN_MISSING = 3, 'column missing'
  NOT_UTF8 = 4, 'not UTF-8, or with NUL bytes'
  EMPTY = 5, 'empty'
  TOO_LONG = 6, 'over {max_chars} characters'
  LANGUAGE = 7, 'in another language'
  LENGTH_RATIO = 8, 'length ratio over {max_ratio:g}'
  DUPLICATE = 9, 'duplicate'
  NEAR_DUPLICATE = 10, 'near-duplicate ({near_duplicates:g})'
  BOILERPLATE = 11, 'one side goes with many others'
  SHARES_SENTENCE = 12, 'sentence is in dev or test'


@dataclasses.dataclass(frozen=True)
class Rules:
  """Rules for keeping and holding out lines."""

  dev: int | None = None  # pairs of dev; None: 1000, or a tenth of those that are fit to keep if that is less
  test: int | None = None  # pairs of test, likewise
  max_chars: int = 1000  # most characters of a line
  max_ratio: float = 3.0  # most that a side may be longer than the other makes expect
  # whether lines that are almost certainly in another language are dropped; None: where py3langid is installed and the
  # files have at most 100 MB
  language_id: bool | None = None
  # similarity from which on most pairs that resemble an earlier one are dropped; 0: none are
  near_duplicates: float = 0.0
  # other sides that a sentence of over 20 characters may go with; None: 20, or one for 100,000 lines
  max_partners: int | None = None
  seed: int = 1  # seed of the choice of dev and test
  corpus: str = 'train'  # prefix of the files of train. Another one than train has no dev and test of its own.

  @property
  def prefixes(self) -> tuple[str, ...]:
    """Of the files of each split that is written."""
    return SPLITS if self.corpus == 'train' else (self.corpus,)


@dataclasses.dataclass(frozen=True)
class Examination:
  """Result of `examine`."""

  outcomes: np.ndarray  # Outcome of every line, uint8
  first_not_utf8: tuple[str, ...]  # 'line 17 of a.de' of the first line of each file that is not UTF-8
  copies: int = 0  # pairs fit to keep whose target is their source
  identified: bool = False  # whether languages were identified
  untold: tuple[str, ...] = ()  # languages that were not told from others, in words

  def count(self, *outcomes: LineOutcome) -> int:
    """Number of lines with one of some outcomes."""
    return int(np.count_nonzero(np.isin(self.outcomes, outcomes)))


class TooFewError(UserError):
  """Too few pairs to be divided; `decisions` says what was dropped."""

  def __init__(self, message: str, decisions: Examination):
    super().__init__(message)
    self.decisions = decisions


def examine(texts: Texts, rules: Rules, progress: Advance | None = None, folder: str = '') -> Examination:
  """Reads all lines, and decides where each goes; `folder` is that of the pair, in which another corpus than
  train finds dev and test; that of the other direction beside it may have some too.

  Raises:
    UserError: the files do not fit each other, or a side is of another encoding.
    TooFewError: too few pairs are left to be divided.
  """
  identifies = _identifies(texts, rules)
  is_other = [language_id.OtherLanguage(side) if identifies else None for side in texts.sides]
  (source, target, source_chars, target_chars, outcomes), near, first_not_utf8 = _read(texts, rules, is_other, progress)
  _drop_ratios(source_chars, target_chars, outcomes, rules.max_ratio)
  pairs = _by_chunks(temperature_sampling.fold, source, target)
  undecided = outcomes == _UNDECIDED
  outcomes[undecided & _repeats(pairs, undecided)] = LineOutcome.DUPLICATE
  undecided = outcomes == _UNDECIDED
  for key in near.T:
    outcomes[undecided & _repeats(np.ascontiguousarray(key), undecided)] = LineOutcome.NEAR_DUPLICATE
  partners = max(_PARTNERS, len(outcomes) // 100_000) if rules.max_partners is None else rules.max_partners
  boilerplate = [
    _is_frequent(side, (outcomes == _UNDECIDED) & (chars > _SHORT), partners)
    for side, chars in ((source, source_chars), (target, target_chars))
  ]
  outcomes[np.logical_or(*boilerplate)] = LineOutcome.BOILERPLATE
  del source_chars, target_chars, near
  copies = int(np.count_nonzero((source == target) & (outcomes == _UNDECIDED)))
  untold = tuple(other.untold for other in is_other if other and other.untold)
  decisions = Examination(outcomes, first_not_utf8, copies, identifies, untold)
  if rules.corpus != 'train':
    folders = _both_ways(os.path.dirname(folder), texts)
    for hashes, language in zip((source, target), texts.sides, strict=True):
      held_out = np.isin(hashes, _held_out_hashes(folders, language))
      outcomes[(outcomes == _UNDECIDED) & held_out] = LineOutcome.SHARES_SENTENCE
    rules = dataclasses.replace(rules, dev=0, test=0)
  _hold_out(source, target, pairs, decisions, rules)
  outcomes[outcomes == _UNDECIDED] = LineOutcome.TRAIN
  return decisions


def _read(
  texts: Texts,
  rules: Rules,
  is_other: Sequence[Callable[[str], bool] | None],
  progress: Advance | None,
) -> tuple[list[np.ndarray], np.ndarray, tuple[str, ...]]:
  """Reads all lines; UserError where a side is of another encoding.

  Returns:
    Columns with an entry for each line: hashes of both sides, their characters, outcomes; keys of near-duplicates,
    [lines, bands]; Examination.first_not_utf8.
  """
  columns, near = [array.array(code) for code in 'QQiiB'], array.array('Q')
  first_not_utf8: dict[int, tuple[int, bytes]] = {}  # by side: number of the line, and the line
  not_utf8 = [0, 0]
  for sides in texts.batches(progress):
    measured = [_measure(side, rules.max_chars, other) for side, other in zip(sides, is_other)]
    for i, (_, _, outcomes) in enumerate(measured):
      bad = np.flatnonzero(outcomes == LineOutcome.NOT_UTF8)
      not_utf8[i] += bad.size
      if bad.size and i not in first_not_utf8:
        first_not_utf8[i] = len(columns[-1]) + int(bad[0]) + 1, sides[i][bad[0]]
    hashes, chars, outcomes = zip(*measured)
    for column, values in zip(columns, (*hashes, *chars, np.minimum(*outcomes)), strict=True):
      column.frombytes(values.tobytes())
    if rules.near_duplicates:
      pairs = [b'\t'.join(side or b'' for side in pair).decode(errors='replace').lower() for pair in zip(*sides)]
      near.frombytes(near_duplicates.keys(pairs, rules.near_duplicates).tobytes())
  lines = len(columns[-1])
  for i, count in enumerate(not_utf8):
    if count > max(_FEW, lines * _SHARE):
      raise _of_another_encoding(texts.where(i), *first_not_utf8[i], count, lines)
  where = tuple(f'line {first_not_utf8[i][0]} of {texts.where(i)}' for i in sorted(first_not_utf8))
  bands = near_duplicates.BANDS if near else 0
  return list(map(np.asarray, columns)), np.asarray(near).reshape(lines, bands), where


def _held_out_hashes(folders: Sequence[str], language: str) -> np.ndarray:
  """Hashes of the sentences of dev and test in folders."""
  packed_files = [file for folder in folders if os.path.isdir(folder) for file in packed.named(folder)]
  paths = [
    path
    for stem, ending, path in packed_files
    if parallel.prefixes([stem])[0] in ('dev', 'test') and ending == language
  ]
  hashes = [_measure(batch, 1)[0] for path in paths for batch in text.line_batches(path)]
  return np.concatenate([np.zeros(0, np.uint64), *hashes])


def _of_another_encoding(path: str, number: int, line: bytes, count: int, lines: int) -> UserError:
  begin = text.bad_byte(line)
  return UserError(
    f'text must be UTF-8; {count:,} of {lines:,} lines are not, first line {number} of {path} (byte {begin + 1}: '
    f'{line[begin : begin + 4]!r}): convert it with iconv -f ENCODING -t utf-8 {shlex.quote(path)}, where ENCODING is '
    'often cp1252 (Western Europe), cp1251 (Cyrillic), gb18030 (Chinese) or shift_jis (Japanese)'
  )


def _identifies(texts: Texts, rules: Rules) -> bool:
  if rules.language_id and not language_id.is_installed():
    raise UserError(f'--language_id needs py3langid, which is not installed: {errors.install_line("prepare")}')
  if rules.language_id is None:
    return texts.bytes() <= _IDENTIFIED_BYTES and language_id.is_installed()
  return rules.language_id


def _measure(
  lines: Side, max_chars: int, is_other: Callable[[str], bool] | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(hashes of keys, characters without outer spaces, outcomes) of lines; _UNDECIDED where nothing is wrong."""
  digests, chars = [], np.zeros(len(lines), np.int32)
  outcomes = np.full(len(lines), _UNDECIDED, np.uint8)
  for i, line in enumerate(lines):
    key = ''
    try:
      decoded = line.decode('utf-8')
      key = text.key(decoded)
      if not key:
        outcomes[i] = LineOutcome.EMPTY
      elif '\0' in decoded:
        outcomes[i] = LineOutcome.NOT_UTF8
      else:
        chars[i] = min(len(decoded.strip()), 2**31 - 1)
        if is_other and chars[i] <= max_chars and is_other(decoded):
          outcomes[i] = LineOutcome.LANGUAGE
    except (AttributeError, UnicodeDecodeError):
      outcomes[i] = LineOutcome.COLUMN_MISSING if line is None else LineOutcome.NOT_UTF8
    digests.append(hashlib.blake2b(key.encode('utf-8'), digest_size=8).digest())
  outcomes[chars > max_chars] = LineOutcome.TOO_LONG
  return np.frombuffer(b''.join(digests), np.uint64), chars, outcomes


def _drop_ratios(source: np.ndarray, target: np.ndarray, outcomes: np.ndarray, most: float) -> None:
  """Drops pairs whose lengths are wildly unlike, by the corpus's own ratio of target to source characters."""
  undecided = outcomes == _UNDECIDED
  sums = [int(side.sum(dtype=np.int64, where=undecided)) for side in (source, target)]
  ratio = sums[1] / max(sums[0], 1)

  def unlike(source, target):
    expected, seen = source * ratio + _SLACK, target + float(_SLACK)
    return np.maximum(expected / seen, seen / expected) > most

  outcomes[undecided & _by_chunks(unlike, source, target)] = LineOutcome.LENGTH_RATIO


def _hold_out(source: np.ndarray, target: np.ndarray, pairs: np.ndarray, decisions: Examination, rules: Rules) -> None:
  """Chooses dev and test among the pairs that are left, and drops pairs that share a sentence with them."""
  outcomes, usable = decisions.outcomes, decisions.outcomes == _UNDECIDED
  total = int(usable.sum())
  dev, test = (min(_HELD_OUT, max(total // 10, 1)) if n is None else n for n in (rules.dev, rules.test))
  wanted = dev + test
  alone = usable.copy()
  for side in (source, target):
    alone &= ~_repeats(side, usable, with_first=True)
  rank = _by_chunks(lambda part: temperature_sampling.fold(rules.seed, 'held out', part), pairs)
  chosen = _smallest(rank, alone, wanted).tolist()
  if len(chosen) < wanted < total:
    chosen += _apart(source, target, rank, usable & ~alone, wanted - len(chosen))
  outcomes[chosen[:test]] = LineOutcome.TEST  # first, so that test stays what it is if there is to be more of dev
  outcomes[chosen[test:]] = LineOutcome.DEV
  for side in (source, target):
    shares = _by_chunks(lambda part, held_out=side[chosen]: np.isin(part, held_out), side)
    outcomes[shares & (outcomes == _UNDECIDED)] = LineOutcome.SHARES_SENTENCE
  if len(chosen) < wanted or not (outcomes == _UNDECIDED).any():
    outcomes[usable] = _UNDECIDED
    most = total // 10
    raise TooFewError(
      f'dev and test, which share no sentence with anything else, must leave pairs to train on; saw {total:,} pairs '
      f'that are fit to keep, of {len(outcomes):,}, for --dev={dev} --test={test}: '
      + (f'use e.g. --dev={most} --test={most}' if most else 'give more text' if total else 'look at what was dropped'),
      decisions,
    )


def _apart(source: np.ndarray, target: np.ndarray, rank: np.ndarray, mask: np.ndarray, count: int) -> list[int]:
  """Up to `count` pairs of a mask, by rank, that share no sentence with each other."""
  index = np.flatnonzero(mask)
  taken: set[tuple[int, int]] = set()  # (side, hash)
  chosen: list[int] = []
  for i in index[np.argsort(rank[index], kind='stable')]:
    if len(chosen) == count:
      break
    sentences = {(0, int(source[i])), (1, int(target[i]))}
    if not taken & sentences:
      chosen.append(int(i))
      taken |= sentences
  return chosen


def _chunks(lines: int) -> Iterator[slice]:
  return (slice(start, start + _CHUNK) for start in range(0, max(lines, 1), _CHUNK))


def _by_chunks(function: Callable[..., np.ndarray], *columns: np.ndarray) -> np.ndarray:
  """function(*columns), computed some lines at a time."""
  return np.concatenate([function(*(column[part] for column in columns)) for part in _chunks(len(columns[0]))])


def _sorted_parts(hashes: np.ndarray, mask: np.ndarray) -> Iterator[np.ndarray]:
  """Yields places in the mask, in parts that share no hash, with those of equal hashes in order one after the other."""
  bucket = hashes.view(np.uint8)[4::8] % np.uint8(_BUCKETS)  # a byte of each
  bucket[~mask] = _BUCKETS
  for b in range(_BUCKETS):
    index = np.flatnonzero(bucket == b)
    yield index[np.argsort(hashes[index], kind='stable')]


def _repeats(hashes: np.ndarray, mask: np.ndarray, with_first: bool = False) -> np.ndarray:
  """Whether each hash occurs in the mask before; `with_first`, whether it occurs in the mask elsewhere."""
  result = np.zeros(len(hashes), bool)
  for index in _sorted_parts(hashes, mask):
    equal = np.diff(hashes[index]) == 0
    result[index[1:][equal]] = True
    if with_first:
      result[index[:-1][equal]] = True
  return result


def _is_frequent(hashes: np.ndarray, mask: np.ndarray, most: int) -> np.ndarray:
  """Whether each hash occurs in the mask more than `most` times."""
  result = np.zeros(len(hashes), bool)
  for index in _sorted_parts(hashes, mask):
    starts = np.flatnonzero(np.concatenate([[True], np.diff(hashes[index]) != 0])[: len(index)])
    counts = np.diff(starts, append=len(index))
    result[index] = np.repeat(counts > most, counts)
  return result


def _smallest(rank: np.ndarray, mask: np.ndarray, count: int) -> np.ndarray:
  """Indices of the `count` smallest ranks in a mask, in order of rank; fewer if there are fewer."""
  best = np.zeros(0, np.int64)
  for part in _chunks(len(rank)):
    best = np.concatenate([best, np.flatnonzero(mask[part]) + part.start])
    best = best[np.argsort(rank[best], kind='stable')][:count]
  return best


def check_folder(out: str, texts: Texts, overwrite: bool, rules: Rules = Rules()) -> str:
  """Path of a pair's folder, which must be new, empty or, with `overwrite`, have only files as written here.

  To it a corpus other than train is added; its files must be new or, with `overwrite`, are replaced. A folder of the
  pair in the other direction takes it as well.
  """
  own_names = {f'{prefix}.{language}' for prefix in rules.prefixes for language in texts.sides}
  folders = _both_ways(out, texts)
  folder = next(filter(os.path.isdir, folders), folders[0])
  name = os.path.basename(folder)
  if os.path.exists(out) and not os.path.isdir(out):
    raise UserError(f'--out must name a folder; {out} is a file: name another')
  stems = {stem for stem, _, _ in packed.named(folder)} if os.path.isdir(folder) else ()
  if rules.corpus != 'train' and (other := parallel.shard_of(rules.corpus, stems)):
    raise UserError(
      f'files of one corpus are not named as shards of another; saw --corpus={rules.corpus}, and {other}: choose '
      'another name, such as bt'
    )
  if not os.path.exists(folder):
    return folder
  present = sorted(os.listdir(folder)) if os.path.isdir(folder) else [name]
  if rules.corpus != 'train':
    present = [path for path in present if path in own_names]
  if present and not overwrite:
    raise UserError(f'{folder} is there already ({", ".join(present[:3])}): name another --out, or say --overwrite')
  foreign = sorted(set(present) - own_names)
  real_folder = os.path.realpath(folder)
  if foreign or any(os.path.dirname(os.path.realpath(path)) == real_folder for path in texts.paths):
    raise UserError(
      f'{folder} is to be replaced, but holds {", ".join(foreign[:3]) or "the text to prepare"}: move that away, or '
      'name another --out'
    )
  return folder


def _both_ways(out: str, texts: Texts) -> list[str]:
  """Folders of the pair: in the direction of the texts, and in the other."""
  return [os.path.join(out, '-'.join(sides)) for sides in (texts.sides, texts.sides[::-1])]


def write(
  texts: Texts, outcomes: np.ndarray, folder: str, progress: Advance | None = None, rules: Rules = Rules()
) -> None:
  """Reads all lines again and writes those of each split; the folder, '.../de-en', appears whole, or is replaced."""
  done = 0
  own_names = {f'{prefix}.{language}' for prefix in rules.prefixes for language in texts.sides}
  with new_folder.writing(folder, replace=True) as partial:
    for name in os.listdir(folder) if rules.corpus != 'train' and os.path.isdir(folder) else ():
      if name not in own_names:
        os.link(os.path.join(folder, name), os.path.join(partial, name), follow_symlinks=False)
    for batch in texts.batches(progress):
      decided = outcomes[done : done + len(batch[0])]
      done += len(batch[0])
      for split, outcome in zip(rules.prefixes, (LineOutcome.TRAIN, LineOutcome.DEV, LineOutcome.TEST)):
        index = np.flatnonzero(decided == outcome).tolist()
        for lines, language in zip(batch, texts.sides, strict=True) if index else ():
          with open(os.path.join(partial, f'{split}.{language}'), 'ab') as f:
            f.writelines(lines[i] + b'\n' for i in index)
    if done != len(outcomes):
      raise UserError(
        f'{" and ".join(texts.paths)} had {len(outcomes)} lines at first, and {done} a moment later: try again'
      )


def table(decisions: Examination, rules: Rules) -> str:
  """Counts as text: lines read, dropped by reason, and of each split, or fit to keep where there is none."""
  rows = [('lines read', len(decisions.outcomes), '')]
  for outcome in LineOutcome:
    note = f'first: {", ".join(decisions.first_not_utf8)}' if outcome == LineOutcome.NOT_UTF8 else ''
    if outcome.reason and (count := decisions.count(outcome)):
      rows.append((f'  dropped: {outcome.reason.format(**dataclasses.asdict(rules))}', count, note))
  if undecided := int(np.count_nonzero(decisions.outcomes == _UNDECIDED)):
    rows.append(('fit to keep', undecided, ''))
  splits = zip(rules.prefixes, (LineOutcome.TRAIN, LineOutcome.DEV, LineOutcome.TEST))
  for split, outcome in splits if not undecided and decisions.count(LineOutcome.TRAIN) else ():
    count = decisions.count(outcome)
    is_tenth = getattr(rules, split, 0) is None and count < _HELD_OUT
    rows.append((split, count, f'a tenth: --{split}=N for another number' if is_tenth else ''))
  kept = undecided + decisions.count(LineOutcome.TRAIN, LineOutcome.DEV, LineOutcome.TEST)
  rows += [('  kept, its language not wholly told', kept, untold) for untold in decisions.untold]
  lines = [f'{label:<40}{count:>14,}  {note}'.rstrip() for label, count, note in rows]
  if not decisions.identified:
    lines.append('languages were not identified: --language_id does, some thousand lines a second')
  return '\n'.join(lines)


def warning(decisions: Examination) -> str:
  """Line on what may be wrong with a corpus; '' where nothing seems to be."""
  total = decisions.count(LineOutcome.TRAIN, LineOutcome.DEV, LineOutcome.TEST, LineOutcome.SHARES_SENTENCE)
  if decisions.copies <= _MANY_COPIES * total:
    return ''
  return f'warning: {decisions.copies:,} of {total:,} targets equal their sources; a model of them learns to copy'
