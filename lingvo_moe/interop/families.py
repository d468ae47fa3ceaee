"""Families of public checkpoints: a file here and a line in this table."""

from __future__ import annotations

from types import ModuleType

from lingvo_moe.core.errors import UserError, shown
from lingvo_moe.interop import m2m100, marian, mixtral, t5
from lingvo_moe.interop.hub_folder import HubFolder
from lingvo_moe.interop.table import Imported

FAMILIES: tuple[ModuleType, ...] = (marian, m2m100, t5, mixtral)


def convert(folder: HubFolder) -> Imported:
  """The folder's model as a run here; UserError where no family knows it, or a value that it has."""
  asked = folder.config.get('architectures')
  asked = asked if isinstance(asked, list) and asked else ['none']
  for family in FAMILIES:
    if asked[0] in family.ARCHITECTURES:
      try:
        return family.convert(folder)
      except UserError:
        raise
      except (KeyError, ValueError) as e:
        raise UserError(
          f'{folder.path} is a {asked[0]} with what is not known here ({type(e).__name__}: {e}): another release of it?'
        ) from None
  known = ', '.join(name for family in FAMILIES for name in family.ARCHITECTURES)
  raise UserError(
    f'{folder.file("config.json")} must name an architecture that can be imported ({known}); saw {shown(asked[0])}'
  )
