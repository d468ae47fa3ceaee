"""Gates: which experts each token goes to. Each makes a Routing (routing.py) of any number of choices."""
