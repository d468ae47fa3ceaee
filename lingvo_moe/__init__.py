"""Mixture-of-experts Transformers for translation, in TensorFlow, after GShard (arXiv:2006.16668)."""

from lingvo_moe.core import quiet

__version__ = '0.1.0'  # setup.py reads it

quiet.install()
