"""Plain text in a folder, which may be remote (storage/files.py): the files of a split, and the documents in them.

A split is `<data_dir>/<split>*.txt[.gz|.xz|.bz2]`, so that `train.txt` may as well be shards, `train-000.txt`,
`train-001.txt`, ..., read in the order of their names. If `x.txt` and `x.txt.gz` both exist, the first is read. Text is
UTF-8.
"""

import os
import re
from collections.abc import Iterator

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import packed
from lingvo_moe.corpora import text as text_lib
from lingvo_moe.storage import files

DOCUMENTS = ('file', 'paragraph', 'line')


def find_files(data_dir: str, split: str) -> list[str]:
  """Paths of a split's files; UserError if there are none."""
  data_dir = text_lib.corpus_folder(data_dir)
  folder, prefix = os.path.split(os.path.join(data_dir, split))
  packed_files = packed.named(folder) if files.isdir(folder) else []
  text_files = [path for stem, ending, path in packed_files if ending == 'txt' and stem.startswith(prefix)]
  if not text_files:
    others = ', '.join(sorted(files.listdir(data_dir))[:5]) or 'nothing'
    raise UserError(
      f'no file {split}*.txt[.gz] in {data_dir}, which has {others}: put one there, or choose another split'
    )
  return text_files


def no_text(path: str) -> UserError:
  """The error of a file that has no text."""
  return UserError(f'a corpus must have text; {path} has none: remove it, or fill it')


def name_of(path: str) -> str:
  """Name of a file in reports: 'dev' for 'data/dev.txt.gz'."""
  return packed.ENDING.sub('', os.path.basename(path)).removesuffix('.txt')


def read(path: str) -> str:
  """The whole text of a file; UserError if it is missing, damaged or no text."""
  with packed.opened(path) as (_, contents):
    raw = contents.read()
  text_lib.check(raw, path)
  return raw.decode('utf-8')


def documents(path: str, kind: str) -> Iterator[str]:
  """Documents of a file, none empty: the file itself, its paragraphs (between empty lines), or its lines."""
  text = read(path)
  for document in [text] if kind == 'file' else re.split(r'\n\s*\n' if kind == 'paragraph' else r'\n', text):
    if document := document if kind == 'file' else document.strip('\r\n'):
      yield document
