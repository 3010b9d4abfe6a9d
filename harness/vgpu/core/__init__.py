"""C++ sources of the execution core."""
