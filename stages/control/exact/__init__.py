"""Small control problems whose answers are known exactly, and the methods that are tested on them."""
