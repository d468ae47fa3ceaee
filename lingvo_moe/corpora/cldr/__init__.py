"""The default corpus: phrases said in 125 languages out of the CLDR data in Babel."""

import importlib.resources
import tomllib

DATA = tomllib.loads(importlib.resources.files(__package__).joinpath('data.toml').read_text(encoding='utf-8'))
