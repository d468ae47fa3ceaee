"""Hosts and origins that a server answers: pages of other origins cannot use it, unless they are named (CORS)."""

import ipaddress
import re
import urllib.parse
from collections.abc import Iterable, Mapping

from lingvo_moe.core.errors import UserError

_ORIGIN = re.compile(r'[a-z][a-z0-9+.-]*://[^/?#\s]+')


class Origins:
  """Check of requests by their headers: origins and host names that the server accepts.

  The origin of a page is the server's own if its host and port are the `Host` of the request, or its host is one of
  `hosts`. Anyone can point a name at a machine (DNS rebinding), so that a page of that name has the server's own
  origin: a server that only its own machine reaches is asked for by a loopback name or one of `hosts`.

  Args:
    cors: origins whose pages may use the server, such as https://my.site; '*' for all.
    hosts: names of the server. Where there are any, others are refused, but for those of loopback.
    loopback: whether the server is bound to a loopback address, and names are checked in any case.
  """

  def __init__(self, cors: Iterable[str] = (), hosts: Iterable[str] = (), loopback: bool = False):
    self._cors = {origin.lower() for origin in cors}
    self._hosts = set()
    for host in hosts:
      if (name := _name(host.lower())) != host.lower().strip('[].') or not name:
        raise UserError(f'--allowed_hosts has names, such as my.site, without scheme and port; not {host!r}')
      self._hosts.add(name)
    self._check_host = loopback or bool(self._hosts)
    for origin in self._cors - {'*'}:
      if not _ORIGIN.fullmatch(origin):
        raise UserError(
          f"--cors has origins, such as https://my.site:8443 without a path, or '*' for all; not {origin!r}"
        )

  def refusal(self, headers: Mapping[str, str]) -> str | None:
    """Why a request is refused, if it is."""
    host, origin = headers.get('Host', '').lower(), headers.get('Origin', '').lower()
    name = _name(host)
    if host and self._check_host and not (name in self._hosts or is_loopback(name)):
      return f'{host:.100} is no name of this server: start it with --allowed_hosts={name:.100}, if it should be'
    is_own_origin = origin in (f'http://{host}', f'https://{host}') or _name(origin.partition('://')[2]) in self._hosts
    if origin and not is_own_origin and not self._cors & {origin, '*'}:
      way_out = f'start the server with --cors={origin:.100} to let them' if origin != 'null' else 'use a page with one'
      return f'pages of the origin {origin:.100} may not use this server: {way_out}'
    return None

  def headers(self, headers: Mapping[str, str]) -> dict[str, str]:
    """Headers of an answer, which let pages of `cors` read it and answer a preflight request."""
    if not self._cors:
      return {}
    vary, origin = {'Vary': 'Origin'}, headers.get('Origin', '').lower()
    if not self._cors & {origin, '*'}:
      return vary
    return {
      'Access-Control-Allow-Origin': '*' if '*' in self._cors else origin,
      'Access-Control-Allow-Methods': 'GET, POST',
      'Access-Control-Allow-Headers': 'Authorization, Content-Type',
      'Access-Control-Expose-Headers': 'Retry-After',
      'Access-Control-Max-Age': '86400',
      **vary,
    }


def is_loopback(name: str) -> bool:
  """Whether a name or address is this machine's own, wherever it is asked for."""
  try:
    return ipaddress.ip_address(name).is_loopback
  except ValueError:
    return name == 'localhost' or name.endswith('.localhost')


def _name(host: str) -> str:
  """Name or address in a Host header, without its port; '' where it has none."""
  try:
    return (urllib.parse.urlsplit(f'//{host}').hostname or '').rstrip('.')
  except ValueError:  # brackets that hold no address
    return ''
