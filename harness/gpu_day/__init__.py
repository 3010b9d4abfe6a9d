"""One session on a machine with an NVIDIA GPU: everything that silicon alone can tell, in a few minutes.

It needs Python, numpy, torch, Triton and cuda-bindings, and no installation: `make gpu-day`, or
`PYTHONPATH=build/imports python3 -m pagedtune.harness.gpu_day`.
"""
