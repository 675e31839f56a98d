"""Where each piece of a model lies: a plan inside a byte-exact budget, made before anything runs. Pure: no device."""
