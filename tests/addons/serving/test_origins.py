"""Which hosts and origins are refused, by headers alone."""

import pytest

from lingvo_moe.addons.serving.origins import Origins
from lingvo_moe.core.errors import UserError


@pytest.mark.parametrize(
  'host',
  [
    'localhost',
    'LocalHost:5000',
    'localhost.',
    'app.localhost:80',
    '127.0.0.1:5000',
    '127.9.9.9',
    '[::1]:5000',
    '[::1]',
  ],
)
def test_a_server_on_loopback_is_asked_for_by_names_of_loopback(host):
  assert Origins(loopback=True).refusal({'Host': host}) is None


@pytest.mark.parametrize(
  'host',
  ['evil.example', 'evil.example:5000', 'localhost.evil.example', '127.0.0.1.evil.example', '0.0.0.0', '192.168.1.5',
   '[::]', '[::1', '[2001:db8::1]', 'evil.example#localhost', 'localhost@evil.example', ' ', '127.1'],
)  # fmt: skip
def test_a_server_on_loopback_refuses_other_names(host):
  """DNS rebinding: a page's own name is made to point at this machine."""
  refused = Origins(loopback=True)
  assert 'is no name of this server: start it with --allowed_hosts=' in refused.refusal({'Host': host})
  assert refused.refusal({'Host': host, 'Origin': f'http://{host}'})
  assert Origins().refusal({'Host': host, 'Origin': f'http://{host}'}) is None  # bound to all addresses, of any name


def test_allowed_hosts_are_names_of_the_server_wherever_it_is_bound():
  for loopback in (True, False):
    named = Origins(hosts=['My.Site', '192.168.1.5', '[2001:db8::1]'], loopback=loopback)
    for host in ('my.site', 'my.site.:8443', '192.168.1.5:5000', '127.0.0.1:5000', '[2001:DB8::1]:5000'):
      assert named.refusal({'Host': host}) is None
    assert named.refusal({'Host': 'evil.example'})
    assert named.refusal({'Host': '127.0.0.1:5000', 'Origin': 'https://my.site'}) is None  # a proxy that changes Host


@pytest.mark.parametrize(
  'origin',
  ['http://evil.example', 'null', 'http://localhost', 'http://localhost:5001', 'http://localhost:50000', 'file://',
   'http://127.0.0.1:5000', 'https://evil.example#localhost:5000', 'localhost:5000', 'ftp://localhost:5000', 'x'],
)  # fmt: skip
def test_an_origin_that_is_not_the_servers_own_is_refused(origin):
  assert f'pages of the origin {origin} may not use' in Origins().refusal({'Host': 'localhost:5000', 'Origin': origin})


def test_the_servers_own_pages_may_use_it_over_http_and_behind_tls():
  own = Origins(loopback=True)
  for origin in ('http://localhost:5000', 'https://localhost:5000', 'HTTP://LOCALHOST:5000'):
    assert own.refusal({'Host': 'localhost:5000', 'Origin': origin}) is None
  assert own.refusal({}) is None  # HTTP/1.0, of no browser


def test_origins_of_cors_are_taken_whole():
  cors = Origins(cors=['https://my.site', 'chrome-extension://abc'])
  host = {'Host': 'translate.example'}
  assert cors.refusal({**host, 'Origin': 'https://my.site'}) is None
  assert cors.refusal({**host, 'Origin': 'chrome-extension://abc'}) is None
  for other in ('http://my.site', 'https://my.site:8443', 'https://my.site.evil.example', 'null'):
    assert cors.refusal({**host, 'Origin': other}) and 'Access-Control-Allow-Origin' not in cors.headers(
      {'Origin': other}
    )
  every = Origins(cors=['*'])
  assert every.refusal({**host, 'Origin': 'null'}) is None
  assert every.headers({'Origin': 'null'})['Access-Control-Allow-Origin'] == '*'
  assert Origins().headers({'Origin': 'https://my.site'}) == {}


@pytest.mark.parametrize('origin', ['my.site', 'https://my.site/', 'null', '', 'https://my.site/path', '*.my.site'])
def test_what_is_no_origin_is_refused_with_an_example(origin):
  with pytest.raises(UserError, match=r"--cors has origins, such as https://my.site:8443 .*; not '"):
    Origins(cors=[origin])


@pytest.mark.parametrize('host', ['https://my.site', 'my.site:80', '', 'my.site/path', '[::1'])
def test_what_is_no_host_is_refused(host):
  with pytest.raises(UserError, match='--allowed_hosts has names, such as my.site, without scheme and port; not'):
    Origins(hosts=[host])
