"""Download of a public model from Hugging Face's hub, by its package huggingface_hub: only the files that are read."""

import contextlib
import importlib.util
import logging
import os
from collections.abc import Iterator

from lingvo_moe.addons.interop import families
from lingvo_moe.addons.interop.hub_folder import SETTINGS, WEIGHTS, WHOLE, HubFolder
from lingvo_moe.core import errors
from lingvo_moe.core.errors import UserError


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
    on_hub = {file.rfilename for file in info.siblings}
    fetch = lambda names: huggingface_hub.snapshot_download(
      name, revision=info.sha, allow_patterns=sorted(on_hub & {*names})
    )
    whole, index = next((pair for pair in WEIGHTS if on_hub & {*pair}), ('', ''))
    if not whole:
      raise UserError(f'{name} must have one of {", ".join(WEIGHTS[0] + WEIGHTS[1])} on the hub; it has none')
    if whole.endswith('.bin') and not importlib.util.find_spec('torch'):
      way_out = f'{errors.install_line("torch")}, or name a --revision with {WHOLE}, such as refs/pr/1'
      raise UserError(f'{name} has its weights as a pickle alone, which torch reads without running it: {way_out}')
    sharded = whole not in on_hub
    folder = HubFolder(fetch([*SETTINGS, *[index] * sharded]))
    weights = folder.weight_map(index).values() if sharded else [whole]
    return fetch([*families.tokeniser(folder), *weights]), f'{name}@{info.sha}'


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
