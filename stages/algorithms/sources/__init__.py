"""One module per source of rl's tasks, named as in `rl.tasks.source`."""
