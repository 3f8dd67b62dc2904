"""Compiled code: how kernels are compiled and cached, threads, memory."""
