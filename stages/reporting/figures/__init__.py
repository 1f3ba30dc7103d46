"""The figures. Every function takes plain data and returns a matplotlib Figure; call them inside `style.drawing()`."""
