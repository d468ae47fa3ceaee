"""Registered translation models, one module for each data set."""
