"""C++ sources of the CPU kernels (package data): `pagedtune_cpu.h` documents their binary interface."""
