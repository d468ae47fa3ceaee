"""Server that speaks as much of the hub's protocol as downloads of models need, for tests."""

import hashlib
import http.server
import json
import re
import threading

COMMIT, EARLIER = 'c0ffee' + 34 * '0', 'decaf' + 35 * '0'


class HubServer:
  """Serves the model a/b, of two commits; a context manager, whose `url` is HF_ENDPOINT.

  `requests` lists (method, path, Range) of all requests; `cut` maps names of files to the bytes after which the
  connection is closed, once.
  """

  def __init__(self, folder, revisions=(('main', COMMIT), ('v1', EARLIER)), extra=()):
    self.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} | dict(extra)
    self.revisions = dict(revisions) | {commit: commit for _, commit in revisions}
    self.requests, self.cut = [], {}

  def __enter__(self):
    hub = self

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = 'HTTP/1.1'
      log_message = staticmethod(lambda *args: None)

      def do_HEAD(self):
        hub.answer(self)

      def do_GET(self):
        hub.answer(self)

    self._server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    self.url = f'http://127.0.0.1:{self._server.server_port}'
    threading.Thread(target=self._server.serve_forever, daemon=True).start()
    return self

  def __exit__(self, *exc):
    self._server.shutdown()
    self._server.server_close()

  def fetched(self):
    """Names of the files whose contents were asked for."""
    return [path.rpartition('/')[2] for method, path, _ in self.requests if method == 'GET' and '/resolve/' in path]

  def answer(self, request):
    self.requests.append((request.command, request.path, request.headers.get('Range')))
    path = request.path.partition('?')[0]
    if path.startswith(('/api/models/a/gated', '/a/gated')):
      return self._refuse(request, 403, 'GatedRepo')
    if not path.startswith(('/api/models/a/b', '/a/b/')):
      return self._refuse(request, 401, 'RepoNotFound')
    match = re.match(r'/api/models/a/b(?:/(revision|tree)/([^/]+))?$|/a/b/resolve/([^/]+)/(.+)$', path)
    commit = self.revisions.get(match[2] or match[3] or 'main')
    if not commit:
      return self._refuse(request, 404, 'RevisionNotFound')
    if match[4]:
      return self._file(request, commit, match[4])
    listing = [{'rfilename': name} for name in self.files]
    tree = [
      {'type': 'file', 'path': name, 'size': len(data), 'oid': hashlib.sha1(data).hexdigest()}
      for name, data in self.files.items()
    ]
    body = tree if match[1] == 'tree' else {'id': 'a/b', 'modelId': 'a/b', 'sha': commit, 'siblings': listing}
    self._send(request, 200, json.dumps(body).encode(), {'Content-Type': 'application/json'})

  def _file(self, request, commit, name):
    data = self.files[name]
    headers = {'X-Repo-Commit': commit, 'ETag': f'"{hashlib.sha1(data).hexdigest()}"', 'Accept-Ranges': 'bytes'}
    begin = int((re.match(r'bytes=(\d+)-', request.headers.get('Range') or '') or [0, 0])[1])
    if begin:
      headers['Content-Range'] = f'bytes {begin}-{len(data) - 1}/{len(data)}'
    stop = self.cut.pop(name, None) if request.command == 'GET' else None
    self._send(request, 206 if begin else 200, data[begin:], headers, stop)

  def _refuse(self, request, status, code):
    self._send(request, status, b'', {'X-Error-Code': code, 'X-Error-Message': code})

  def _send(self, request, status, body, headers, stop=None):
    request.send_response(status)
    for name, value in {**headers, 'Content-Length': len(body)}.items():
      request.send_header(name, value)
    request.end_headers()
    if request.command == 'GET':
      request.wfile.write(body[:stop])
      if stop is not None:
        request.close_connection = True
