"""One experiment on several seeds and with several values of its keys: what is run, what is kept, what is shown."""
