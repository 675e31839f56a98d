"""The `ete` command: one file per subcommand, heavy imports inside them."""
