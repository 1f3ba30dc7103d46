"""An environment, an RL method and a merge method outside Bellwether's own repository."""
