"""Gates choose the experts of each token: a file each and a line in table.py. All return a Routing (routing.py)."""
