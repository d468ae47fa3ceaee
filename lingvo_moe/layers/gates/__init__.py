"""Gates choose the experts of each token: one file each. All return a Routing (routing.py), of any number of choices."""
