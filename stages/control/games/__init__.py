"""Small games, whose equilibria can be checked exhaustively."""
