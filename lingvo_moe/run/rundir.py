"""Log directory of a run as jobs use it: locked, begun or resumed, and loaded.

docs/log_directory.md lists the files in it, which are all that decoder and translate read.
"""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import IO, Any

from lingvo_moe.config import configuration, fields
from lingvo_moe.core.errors import UserError, closest
from lingvo_moe.run.checkpoints import Checkpoints
from lingvo_moe.storage import files, json_files, locks, log_directory
from lingvo_moe.tasks.task import TaskConfig, task_of


@dataclasses.dataclass(frozen=True)
class RunDir:
  """Paths of a log directory, which may be remote (storage/files.py).

  What must be local, the task's own files and caches, then lies in a local copy (`local`).
  """

  path: str
  vocab_outside: bool = False  # whether its configuration may name vocabularies outside of it

  def __post_init__(self):
    files.check_scheme('a log directory', self.path, files.SCHEMES)
    object.__setattr__(self, 'path', files.plain(os.fspath(self.path)))

  @property
  def local(self) -> str:
    """The directory itself, or its local copy if it is remote."""
    return files.local_copy_of(self.path)

  def file(self, *parts: str) -> str:
    return os.path.join(self.path, *parts)

  @property
  def config_file(self) -> str:
    return self.file(log_directory.CONFIG)

  @property
  def vocab_dir(self) -> str:
    return os.path.join(self.local, log_directory.VOCAB)

  @property
  def cache_dir(self) -> str:
    return os.path.join(self.local, log_directory.CACHE)

  def checkpoints(self, keep: int = 3, keep_every: int = 0, constant: Collection[str] = ()) -> Checkpoints:
    return Checkpoints(self.file(log_directory.CHECKPOINTS), keep, keep_every, constant)

  @property
  def exists(self) -> bool:
    return files.exists(self.config_file)

  def lock(self) -> IO:
    """Keeps other trainers out until the file that is returned is closed, or the process ends.

    A remote directory cannot be locked: there it is for the scheduler to start one trainer.
    """
    files.check_for_tensorflow('--logdir', self.path)
    try:
      files.makedirs(self.path)
      if not files.is_remote(self.path):
        tempfile.TemporaryFile(dir=self.path).close()
    except OSError as e:
      raise UserError(
        f'--logdir={self.path} must be a directory that can be written to ({e.strerror}): '
        'choose another, or change its owner or mode'
      ) from None
    if files.is_remote(self.path):
      return open(os.devnull, 'w')
    lock = files.append(self.file('.lock'))
    if not locks.take(lock.fileno(), wait=False):
      raise UserError(
        f'one trainer at a time works in a log directory; another has {self.path}: wait for it, or choose another'
      )
    return lock

  @contextlib.contextmanager
  def locked(self) -> Iterator[IO]:
    """Locks the directory, as `lock`, for a run to begin or resume; removes a new directory whose run cannot begin."""
    is_new = not files.exists(self.path)
    lock = self.lock()
    try:
      yield lock
    except BaseException:  # also a signal, or a full disk
      lock.close()
      if is_new and not self.exists:
        self._remove_if_empty()
      raise

  def begin(
    self, name: str, config: TaskConfig, settle: Callable[[TaskConfig], TaskConfig] = lambda config: config
  ) -> TaskConfig:
    """Begins or resumes a run with a configuration: prepares the task's files, and writes config.json.

    Args:
      name: of the model.
      config: as the flags ask for it.
      settle: called with the configuration before it is written; returns it without None where a field is left to the
        corpus, or refuses it.

    Returns:
      The configuration, which names the run's own files.

    Raises:
      UserError: the run that is here is another, or one of its files is not what it was.
    """
    resumed = self.exists
    if not resumed and self.checkpoints().steps():
      raise UserError(
        f'{self.path} has checkpoints and no config.json, which says what they were trained with: restore it from a '
        'copy, or choose another --logdir'
      )
    self._check_links()
    old_name, old = configuration.load(self.config_file) if resumed else (name, None)
    if old_name != name:
      raise UserError(f'{self.path} holds a run of {old_name}, not of {name}: choose another --logdir')
    if resumed:
      self.check_files()
    self._fetch()
    config, left_open = task_of(config).prepare(self.vocab_dir, resumed), fields.left_open(config)
    may_change = fields.may_change(type(config)) if resumed else []
    if resumed:
      kept = [n for n, spec in fields.specs(type(config)).items() if spec.settled and getattr(config, n) is None]
      chosen = configuration.left_open(self.config_file, type(config))
      config = dataclasses.replace(config, **{name: getattr(old, name) for name in {*kept, *left_open.keys() & chosen}})
      left_open |= {name: value for name, value in chosen.items() if getattr(config, name) == getattr(old, name)}
    config = fields.with_choices(config)
    if resumed and (changed := configuration.differences(fields.with_choices(old), config, may_change)):
      raise UserError(
        f'{self.path} holds a run with {"; ".join(changed)}: a run goes on as it began, but for '
        f'{", ".join(may_change)}; set it back, or choose another --logdir, which may begin with the weights of this '
        f'run by --init_from={self.path}'
      )
    config = settle(config)
    self.write_config(name, config, left_open)
    return config

  def write_config(self, name: str, config: TaskConfig, left_open: Mapping[str, Any] | None = None) -> None:
    """Writes config.json, with the hashes of the files of the run that the configuration names."""
    fingerprints = {}

    def relative(path):
      relative_path = os.path.relpath(path, self.local)
      fingerprints[relative_path] = files.sha256(path)
      return relative_path

    left_open = {**fields.left_open(config), **(left_open or {})}
    relocated = task_of(fields.with_choices(config)).with_files(relative)
    self._put(fingerprints)
    configuration.save(name, relocated, self.config_file, fingerprints, left_open)

  def load(self, model: str | None = None) -> tuple[str, TaskConfig]:
    """(model name, configuration) of the run that is here, its files with full paths; `model` must be its, if given."""
    if not files.isdir(self.path):
      raise UserError(f'{self.path}: there is no such directory; give the log directory of a run')
    name, config = configuration.load(self.config_file)
    if model and model != name:
      raise UserError(
        f'{self.path} holds a run of {name}, not of --model={model}: leave --model out, or give another --logdir'
      )
    self._fetch()
    config = task_of(config).with_files(self._own)
    self.check_files()
    return name, config

  def load_open(self) -> tuple[str, TaskConfig]:
    """(model name, configuration) for a run that begins with the values of this one: what it chose is chosen again."""
    name, config = self.load()
    return name, dataclasses.replace(config, **configuration.left_open(self.config_file, type(config)))

  def load_config(self, model: str | None = None, **overrides) -> TaskConfig:
    """The configuration of the run, with the overrides that are not None in place of its own values.

    Raises:
      UserError: there is no run, or it is not of `model`, or it has no such field, or a value is out of its range.
    """
    name, config = self.load(model)
    overrides = {field: value for field, value in overrides.items() if value is not None}
    known = [field.name for field in dataclasses.fields(config)]
    if unknown := next((field for field in overrides if field not in known), None):
      raise UserError(f'{name} has no field {unknown!r}, so that {unknown}= has no meaning; {closest(unknown, known)}')
    return dataclasses.replace(config, **overrides)

  def _own(self, path: str) -> str:
    """Full path of a file that the configuration names; a run of someone else must not make us read other files."""
    full = os.path.join(self.local, path)
    if path and not self.vocab_outside and not files.is_inside(full, self.local):
      raise UserError(
        f'{self.config_file} must name vocabularies in its own log directory; saw {full}: copy it to {self.vocab_dir} '
        'and name that; or, if you trust the run, decode, translate, serve or export with --vocab_outside (load: '
        'vocab_outside=True)'
      )
    return full

  def check_files(self) -> None:
    """Raises UserError if a file of the run, such as a vocabulary, is not the one that config.json has the hash of."""
    for name, fingerprint in configuration.fingerprints(self.config_file).items():
      path = self.file(name)
      if files.isfile(path) and (actual := files.sha256(path)) != fingerprint:
        raise UserError(
          f'{path} is not the file that the run began with (SHA-256 {actual[:12]}..., and {fingerprint[:12]}... in '
          f'{self.config_file}): restore it from a copy'
        )

  def _check_links(self) -> None:
    """Raises UserError where a folder that the trainer writes to is a link out of the log directory."""
    checkpoints = self.checkpoints()
    steps = [os.path.dirname(checkpoints.path(step)) for step in checkpoints.steps()]
    for folder in (self.vocab_dir, self.cache_dir, checkpoints.directory, *steps):
      if not files.is_inside(folder, self.local if folder in (self.vocab_dir, self.cache_dir) else self.path):
        raise UserError(
          f'a trainer writes in its log directory alone; {folder} is a link to {os.path.realpath(folder)}: remove it, '
          'and move the log directory to where there is room (--cache_dir for the cache), or mount that in its place'
        )

  def finish(self, step: int, reason: str) -> None:
    files.write(self.file(log_directory.FINISHED), json_files.dump({'step': step, 'reason': reason}))

  @contextlib.contextmanager
  def unfinished(self) -> Iterator[None]:
    """Removes the mark of a finished run, for which decoders end; puts it back where what is done within fails."""
    path = self.file(log_directory.FINISHED)
    mark = files.read(path) if self.finished else None
    files.remove(path)
    try:
      yield
    except BaseException:
      if mark is not None:
        files.write(path, mark)
      raise

  @property
  def finished(self) -> bool:
    return files.exists(self.file(log_directory.FINISHED))

  def _fetch(self):
    """Copies the task's own files of a remote directory into the local copy."""
    if files.is_remote(self.path):
      os.makedirs(self.vocab_dir, exist_ok=True)
      for name in files.listdir(self.file(log_directory.VOCAB)):
        files.write(os.path.join(self.vocab_dir, name), files.read(self.file(log_directory.VOCAB, name)))

  def _put(self, fingerprints):
    """Copies the task's own files of the local copy into a remote directory."""
    if files.is_remote(self.path):
      names = [name for name in os.listdir(self.vocab_dir) if not name.startswith('.')]
      for name in {os.path.join(log_directory.VOCAB, name) for name in names} | set(fingerprints):
        files.makedirs(os.path.dirname(self.file(name)))
        files.write(self.file(name), files.read(os.path.join(self.local, name)))

  def _remove_if_empty(self):
    """Removes the directory if no file but locks is in it or below it."""
    folders = list(os.walk(self.path, topdown=False))
    if all(name == '.lock' for _, _, names in folders for name in names):
      for folder, _, names in folders:
        for name in names:
          os.remove(os.path.join(folder, name))
        os.rmdir(folder)
