"""Mixture-of-experts Transformers for translation, in TensorFlow, after GShard (arXiv:2006.16668)."""
