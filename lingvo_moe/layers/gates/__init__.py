"""Gates choose the experts of each token. Each returns a Routing (routing.py) with any number of choices."""
