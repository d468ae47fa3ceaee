"""Download of a public model from Hugging Face's hub, by its package huggingface_hub: only the files that are read."""

import contextlib
import functools
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from lingvo_moe.addons.interop import families
from lingvo_moe.addons.interop.hub_folder import SETTINGS, WEIGHTS, WHOLE, HubFolder
from lingvo_moe.core import errors
from lingvo_moe.core.errors import UserError, shown

_PLAIN = re.compile(r'(W/)?"?\w[\w.+=-]{0,199}"?', re.ASCII)  # header that names a file of the cache


def download(name: str, revision: str = '') -> tuple[str, str]:
  """Downloads what an import reads of a model; files that the cache of the hub has already are not fetched again.

  Args:
    name: OWNER/NAME on the hub.
    revision: branch, tag or commit; '': the newest.

  Returns:
    (the model's folder in the cache, the name with the commit: 'OWNER/NAME@HASH').

  Raises:
    UserError: huggingface_hub is not installed; there is no such model or revision, it may not be read, or it has no
      weights that can be read here; the hub cannot be reached, or stopped answering.
  """
  try:
    import huggingface_hub
  except ImportError as e:
    raise errors.not_installed('--hub needs huggingface_hub', e, 'hub') from None
  for http_library in ('httpx', 'httpx2'):  # a line per request otherwise
    logging.getLogger(http_library).setLevel(logging.WARNING)
  with _explained(name, revision):
    info = huggingface_hub.HfApi().model_info(name, revision=revision or None)
    if not re.fullmatch('[0-9a-f]{40}', info.sha):
      raise ValueError(f'commit {shown(info.sha)}')
    on_hub, commit = {file.rfilename for file in info.siblings}, info.sha
    fetch = lambda names: _fetch(name, commit, [file for file in dict.fromkeys(names) if file in on_hub])
    whole, index = next((pair for pair in WEIGHTS if on_hub & {*pair}), ('', ''))
    if 'config.json' not in on_hub:
      raise UserError(f'{name} must have a config.json on the hub; it has none: is it a model of transformers?')
    if not whole:
      raise UserError(f'{name} must have one of {", ".join(WEIGHTS[0] + WEIGHTS[1])} on the hub; it has none')
    if whole.endswith('.bin') and not importlib.util.find_spec('torch'):
      way_out = f'{errors.install_line("torch")}, or name a --revision with {WHOLE}, such as refs/pr/1'
      raise UserError(f'{name} has its weights as a pickle alone, which torch reads without running it: {way_out}')
    sharded = whole not in on_hub
    folder = HubFolder(fetch([*SETTINGS, *[index] * sharded]))
    weights = folder.weight_map(index).values() if sharded else [whole]
    return fetch([*families.tokeniser(folder), *weights]), f'{name}@{commit}'


def _fetch(name: str, commit: str, files: Sequence[str]) -> str:
  """Downloads files into the cache, one after the other; returns their folder.

  snapshot_download would also take names for the cache from a listing, which is not checked.
  """
  import huggingface_hub

  with _checked_names(huggingface_hub):
    paths = [huggingface_hub.hf_hub_download(name, file, revision=commit) for file in files]
  return os.path.dirname(paths[0])


@contextlib.contextmanager
def _checked_names(huggingface_hub: ModuleType) -> Iterator[None]:
  """Has every answer checked by `_check_names`, in all sessions that huggingface_hub opens meanwhile."""
  http, of_httpx = huggingface_hub.utils._http, hasattr(huggingface_hub, 'set_client_factory')  # since release 1
  install = huggingface_hub.set_client_factory if of_httpx else huggingface_hub.configure_http_backend
  before = http._GLOBAL_CLIENT_FACTORY if of_httpx else http._GLOBAL_BACKEND_FACTORY
  install(functools.partial(_checked_session, before))
  try:
    yield
  finally:
    install(before)


def _checked_session(make: Callable[[], Any]) -> Any:
  session = make()
  hooks = session.event_hooks if hasattr(session, 'event_hooks') else session.hooks
  hooks['response'].append(_check_names)
  return session


def _check_names(response: Any, **_: Any) -> None:
  """Refuses an answer by whose headers a file of the cache would be elsewhere: there they are names of files."""
  for header in ('ETag', 'X-Linked-ETag', 'X-Repo-Commit', 'X-Xet-Hash'):
    if header in response.headers and not _PLAIN.fullmatch(value := response.headers[header]):
      raise ValueError(f'{header} {shown(value)}')


@contextlib.contextmanager
def _explained(name: str, revision: str) -> Iterator[None]:
  """Raises a UserError for what huggingface_hub raises, and for failures of the network below it."""
  from huggingface_hub import constants
  from huggingface_hub import errors as hub

  try:
    yield
  except UserError:
    raise
  except hub.HFValidationError:
    raise UserError(f'--hub names a model as OWNER/NAME, such as Helsinki-NLP/opus-mt-de-en; saw {name!r}') from None
  except hub.GatedRepoError:
    way_out = 'agree on its page, then hf auth login, or set HF_TOKEN'
    raise UserError(f'{name} is read by those alone who agreed to its terms: {way_out}') from None
  except hub.RepositoryNotFoundError:
    way_out = 'check the spelling; for a private model, hf auth login, or set HF_TOKEN'
    raise UserError(f'the hub has no model {name} that you may read: {way_out}') from None
  except hub.RevisionNotFoundError:
    raise UserError(f'{name} has no --revision={revision}: name a branch, a tag or a commit, or leave it out') from None
  except (OSError, RuntimeError, *hub.HfHubHTTPError.__bases__) as e:  # the base is that of the HTTP library beneath
    if isinstance(e, OSError) and e.errno and not isinstance(e, ConnectionError):
      raise  # of the disk
    cache = os.path.join(constants.HF_HUB_CACHE, 'models--' + name.replace('/', '--'))
    raise UserError(
      f'the hub ({constants.ENDPOINT}) did not give all files of {name} ({errors.reason(e)}): the same command goes on '
      f'with those that are missing; a model that is complete in {cache} is imported as a folder, snapshots/HASH'
    ) from None
  except Exception as e:  # whatever huggingface_hub makes of an answer that is not of its protocol
    raise UserError(
      f'the hub ({constants.ENDPOINT}) gave an answer for {name} that is not of its protocol ({type(e).__name__}: '
      f'{errors.reason(e)}): check HF_ENDPOINT, or try again later'
    ) from None
