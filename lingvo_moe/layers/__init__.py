"""Layers: frozen dataclasses that say what weights they own and compute with a `theta` handed to them."""
