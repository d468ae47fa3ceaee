"""The notebook that jupytext makes of docs/gshard_in_ten_steps.md: its cells run in Jupyter's kernel."""

import pathlib
import re

import jupytext
import nbclient

DOCUMENT = pathlib.Path(__file__).resolve().parent.parent / 'docs' / 'gshard_in_ten_steps.md'
PRINT = re.compile(r'^print\(.*\)  # (.*)$', flags=re.MULTILINE)


def test_every_snippet_is_a_cell_that_prints_what_it_says():
  notebook = jupytext.read(DOCUMENT)
  nbclient.NotebookClient(notebook, timeout=240, kernel_name='python3').execute()
  cells = [cell for cell in notebook.cells if cell.cell_type == 'code']
  printed = [
    ''.join(output.text for output in cell.outputs if output.get('name') == 'stdout').splitlines() for cell in cells
  ]
  assert printed == [PRINT.findall(cell.source) for cell in cells]
  assert len(cells) == DOCUMENT.read_text(encoding='utf-8').count('```python')
  assert sum(map(len, printed)) > 10
  errors = [output.text for cell in cells for output in cell.outputs if output.get('name') == 'stderr']
  assert errors == []
