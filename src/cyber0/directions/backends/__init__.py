"""Kernels that give the bits of definition.py, one module for each kind of device."""
