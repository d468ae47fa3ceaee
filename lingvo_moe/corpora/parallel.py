"""Parallel corpora in a folder: finds language pairs and their files, and reads their lines.

The folder may be remote (storage/files.py). There are two layouts, which are recognised automatically:
- folders: `<data_dir>/<source>-<target>/<split>.<language>[.gz]`, e.g. `deu-en/train.deu.gz` with `deu-en/train.en.gz`;
  `en-deu` names the same files in the other direction, unless there is a folder of that name;
- plain files: `<data_dir>/<split>.<language>[.gz]`, e.g. `train.de.gz` with `train.en.gz`; any two languages make a
  pair, in either direction.

A side may consist of shards instead of one file, `train-*.<language>[.gz]`, read in the order of their names. If `x.de`
and `x.de.gz` both exist, the first is read. The ending may also be .xz or .bz2. Lines end with LF (CR before it is
dropped) and are UTF-8.
"""

import dataclasses
import difflib
import fnmatch
import itertools
import os
import re
from collections.abc import Iterable, Mapping

from lingvo_moe.core.errors import UserError, closest
from lingvo_moe.corpora import packed, text
from lingvo_moe.storage import files

SPLITS = ('train', 'dev', 'test')


class MissingFilesError(UserError):
  """Split or pair without any file."""


class NoPairError(MissingFilesError):
  """Pattern that matches no pair."""


@dataclasses.dataclass(frozen=True)
class Pair:
  """Language pair in one split, with the files of its two sides: line i of one file translates line i of the other."""

  name: str  # 'deu-en'
  source: str  # 'deu'
  target: str  # 'en'
  split: str
  source_files: tuple[str, ...]
  target_files: tuple[str, ...]  # as many, in the same order

  @property
  def sides(self) -> tuple[tuple[str, tuple[str, ...]], tuple[str, tuple[str, ...]]]:
    """(language, files) of the source and of the target."""
    return (self.source, self.source_files), (self.target, self.target_files)


def find_pairs(
  data_dir: str, pairs: str = '', split: str = 'train', split_files: Mapping[str, str] | Iterable[tuple[str, str]] = ()
) -> list[Pair]:
  """Finds the chosen pairs that have the split, sorted by name.

  Args:
    data_dir: a folder in one of the two layouts.
    pairs: names and globs separated by commas, 'deu-en,fra-en' or '*-en'. Empty takes every folder. A pattern that
      matches no folder may match reversed names of folders: 'en-*'. Plain files give no direction, so there a pair
      must be named.
    split: 'train', 'dev', 'test' or any file prefix.
    split_files: other prefixes for splits, e.g. {'dev': 'val'}.

  Raises:
    MissingFilesError: there are no files, or (NoPairError) no pair matches.
    UserError: a side or shard has no partner, or plain files have no pair named.
  """
  data_dir = text.corpus_folder(data_dir)
  prefixes = dict(split_files)
  prefix = prefixes.get(split, split)
  patterns = [p.strip() for p in pairs.split(',') if p.strip()]
  folders = _pair_folders(data_dir)
  folders |= _reversed(folders, patterns) if folders else _plain_directions(data_dir, patterns, split, prefixes)
  pairs_by_name = {name: _pair(name, *folders[name], split, prefix) for name in _choose(folders, patterns, data_dir)}
  missing = [name for name, pair in pairs_by_name.items() if pair is None]
  named = [name for name in missing if name in patterns and split == 'train']
  if named or len(missing) == len(pairs_by_name):
    raise _no_such_file(*folders[(named or missing)[0]], split, prefixes)
  return [pair for pair in pairs_by_name.values() if pair is not None]


def pair_folders(data_dir: str) -> list[tuple[str, str]]:
  """(source, target) of every pair folder; none where files are plain."""
  return [(source, target) for _, source, target in _pair_folders(text.corpus_folder(data_dir)).values()]


def languages_of(names: Iterable[str]) -> list[tuple[str, str]]:
  """(source, target) of each name of a pair.

  One with several hyphens is cut beside a language of the other names, or before the last part that begins with a small
  letter, as codes of languages do.
  """
  cut = {name: [(name[:i], name[i + 1 :]) for i, c in enumerate(name) if c == '-'] for name in sorted(names)}
  known = {language for ways in cut.values() if len(ways) == 1 for language in ways[0]}
  is_code = lambda way: way[1][:1].islower()  # 'pt-BR' of 'en-pt-BR', but not 'BR'
  guess = lambda ways: next(filter(is_code, reversed(ways)), ways[-1])
  return [next((way for way in ways if set(way) & known), guess(ways)) for ways in cut.values() if ways]


def _choose(known: Iterable[str], patterns: list[str], data_dir: str) -> list[str]:
  """Known names that match any of the patterns; NoPairError for a pattern without a match."""
  chosen = set()
  for pattern in patterns or ['*']:
    chosen.update(matching := fnmatch.filter(known, pattern))
    if patterns and not matching:
      raise NoPairError(
        f'no pair of {data_dir} matches {pattern!r}; {closest(pattern, known)} (trainer: --set pairs=..., others: '
        '--pairs=...)'
      )
  return sorted(chosen)


def _pair_folders(data_dir: str) -> dict[str, tuple[str, str, str]]:
  """(folder, source, target) by name, of folders named after two languages and with files of at least one."""
  result = {}
  for name in sorted(files.listdir(data_dir)):
    folder = os.path.join(data_dir, name)
    if '-' not in name or not files.isdir(folder):
      continue
    languages = {language for _, language, _ in packed.named(folder)}
    ways = [(name[:i], name[i + 1 :]) for i, c in enumerate(name) if c == '-']  # a language code may contain a hyphen
    ways = [way for way in ways if languages & {*way}]
    if ways:
      result[name] = (folder, *next((way for way in ways if languages >= {*way}), ways[-1]))
  return result


def _reversed(folders: Mapping[str, tuple[str, str, str]], patterns: Iterable[str]) -> dict[str, tuple[str, str, str]]:
  """Folders with source and target exchanged, whose reversed names match a pattern that matches no folder's name."""
  reverse = {f'{target}-{source}': (folder, target, source) for folder, source, target in folders.values()}
  lacking = [pattern for pattern in patterns if not fnmatch.filter(folders, pattern)]
  return {name: reverse[name] for pattern in lacking for name in fnmatch.filter(reverse, pattern)}


def _plain_directions(data_dir, patterns, split, prefixes) -> dict[str, tuple[str, str, str]]:
  """The same of plain files: any two languages, in either direction."""
  prefix = prefixes.get(split, split)
  known = sorted({language for stem, language, _ in packed.named(data_dir) if _has_prefix(stem, prefix)})
  if not known:
    raise _no_such_file(data_dir, '<source>', '<target>', split, prefixes)
  directions = {f'{s}-{t}': (data_dir, s, t) for s in known for t in known if s != t}
  if not patterns:
    raise UserError(
      f'plain files give no direction, so a pair must be named; {data_dir} has {prefix}.* in {", ".join(known)}: '
      f'give one with --set pairs={next(iter(directions), "de-en")}'
    )
  return directions


def prefixes(stems: Iterable[str]) -> list[str]:
  """Prefixes of splits and corpora that have files of these stems; shards have that of their split or corpus."""
  of_split = lambda stem: next((split for split in SPLITS if _has_prefix(stem, split)), '')
  return sorted({of_split(stem) or re.sub(r'-\d+\Z', '', stem) for stem in stems})


def shard_of(prefix: str, stems: Iterable[str]) -> str | None:
  """Split or corpus of which files of this prefix would be shards, or which would be its shards."""
  stems = {*stems}
  others = {*SPLITS, *stems, *prefixes(stems)} - {prefix}
  return next((other for other in sorted(others) if _has_prefix(prefix, other) or _has_prefix(other, prefix)), None)


def _has_prefix(stem: str, prefix: str) -> bool:
  """Whether a stem is that of a split's file, or of one of its shards."""
  return stem == prefix or stem.startswith(prefix + '-')


def _side(folder: str, prefix: str, language: str) -> dict[str, str]:
  """Files of one side by stem: the file of this prefix and language, or its shards."""
  stems = {stem: path for stem, ending, path in packed.named(folder) if ending == language}
  if prefix in stems:
    return {prefix: stems[prefix]}
  return {stem: path for stem, path in stems.items() if _has_prefix(stem, prefix)}


def _pair(name, folder, source, target, split, prefix) -> Pair | None:
  sources, targets = _side(folder, prefix, source), _side(folder, prefix, target)
  if not sources and not targets:
    return None
  if lonely := sorted(set(sources) ^ set(targets)):
    stem = lonely[0]
    path, lacking = (sources[stem], target) if stem in sources else (targets[stem], source)
    raise UserError(f'both sides of a pair must be there; saw {path} without {stem}.{lacking}[.gz] beside it')
  stems = sorted(sources)
  return Pair(name, source, target, split, tuple(sources[s] for s in stems), tuple(targets[s] for s in stems))


def _no_such_file(folder, source, target, split, prefixes) -> MissingFilesError:
  prefix = prefixes.get(split, split)
  stems = {stem for stem, _, _ in packed.named(folder)}
  exists = lambda prefix: any(_has_prefix(stem, prefix) for stem in stems)
  mapped = {other: p for other, p in prefixes.items() if other != split and exists(p)}
  if not exists(split):
    others = ('train', 'dev', 'test', *mapped.values())
    free = [stem for stem in stems if not any(_has_prefix(stem, other) for other in others)]
    mapped[split] = next(iter(difflib.get_close_matches(split, free, n=1, cutoff=0)), 'PREFIX')
  return MissingFilesError(
    f'no file {prefix}.{source}[.gz] and {prefix}.{target}[.gz] in {folder}; of the splits there, '
    f'{closest(prefix, stems)} (name one, or train with other prefixes: --set "split_files={tuple(mapped.items())}")'
  )


def read_pair(pair: Pair) -> tuple[list[str], list[str]]:
  """Reads (source lines, target lines) of a held-out set."""
  sources, targets = ([list(text.lines([path])) for path in side] for side in (pair.source_files, pair.target_files))
  check_counts(pair, map(len, sources), map(len, targets))
  return list(itertools.chain(*sources)), list(itertools.chain(*targets))


def count_lines(pair: Pair) -> int:
  """Number of lines of a pair; UserError if the two sides differ or are empty."""
  return check_counts(pair, map(text.count_lines, pair.source_files), map(text.count_lines, pair.target_files))


def check_counts(pair: Pair, source_counts: Iterable[int], target_counts: Iterable[int]) -> int:
  """Number of lines of a pair, given those of each file; UserError as count_lines."""
  counts = list(zip(pair.source_files, source_counts, pair.target_files, target_counts, strict=True))
  for source_file, sources, target_file, targets in counts:
    if sources != targets:
      raise unequal_sides(source_file, sources, target_file, targets)
  total = sum(sources for _, sources, _, _ in counts)
  if not total:
    raise UserError(f'a corpus must have lines; {", ".join(pair.source_files)} is empty')
  return total


def unequal_sides(source_file: str, sources: int, target_file: str, targets: int) -> UserError:
  """The error of two files with different numbers of lines."""
  return UserError(
    f'line i of one side goes with line i of the other, so both need as many lines; saw {sources} in {source_file} and '
    f'{targets} in {target_file}: align them'
  )
