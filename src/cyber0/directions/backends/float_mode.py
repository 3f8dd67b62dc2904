"""The floating-point mode of a thread, seen from a numba kernel.

A user may have asked torch to flush denormals on this thread, and new threads inherit that. The bits of a commit must
not depend on it, so every kernel sets the plain mode when it starts and puts the old one back when it ends.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_MACHINE = platform.machine().lower()


@intrinsic
def set_float_mode(typingctx: Any, mode: Any) -> Any:
    """Set the thread's floating-point mode and return the old one (x86: MXCSR, ARM: FPCR; elsewhere: nothing)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        module = builder.module
        if _MACHINE in ("x86_64", "amd64"):
            slot = cgutils.alloca_once(builder, ir.IntType(32))
            pointer = builder.bitcast(slot, ir.PointerType(ir.IntType(8)))
            kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(ir.IntType(8))])
            store = cgutils.get_or_insert_function(module, kind, "llvm.x86.sse.stmxcsr")
            load = cgutils.get_or_insert_function(module, kind, "llvm.x86.sse.ldmxcsr")
            builder.call(store, [pointer])
            old = builder.zext(builder.load(slot), ir.IntType(64))
            builder.store(builder.trunc(args[0], ir.IntType(32)), slot)
            builder.call(load, [pointer])
            return old
        if _MACHINE in ("aarch64", "arm64"):
            get = cgutils.get_or_insert_function(module, ir.FunctionType(ir.IntType(64), []), "llvm.aarch64.get.fpcr")
            put = cgutils.get_or_insert_function(
                module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)]), "llvm.aarch64.set.fpcr"
            )
            old = builder.call(get, [])
            builder.call(put, [args[0]])
            return old
        return args[0]

    return types.uint64(types.uint64), codegen


# Round to nearest even, denormals kept, no traps.
EXACT = np.uint64(0x1F80) if _MACHINE in ("x86_64", "amd64") else np.uint64(0)
