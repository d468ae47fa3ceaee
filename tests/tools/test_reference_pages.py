"""Pages of the documentation that are made from the registered models."""

import pathlib

import forks
import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize('page', ['models', 'fields'])
def test_the_page_of_the_documentation_is_what_the_command_prints(page):
  written = (ROOT / 'docs' / f'{page}.md').read_text(encoding='utf-8')
  command = f'tools/reference_pages.py --page={page}'
  assert forks.run(command.split(), cwd=ROOT).stdout == written, f'python {command} > docs/{page}.md'
