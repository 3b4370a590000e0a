"""Loops as machine code: numba makes it once, and llvmlite alone loads it again, for numba takes half a second to get ready.

A compiled function takes arrays, numbers and named tuples of these. It neither allocates nor raises: it is given what it needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType
from typing import IO, Any

import numpy as np

_SCALARS = {"bool": ctypes.c_int64, "int": ctypes.c_int64, "float": ctypes.c_double}
_PER_SECOND = 600  # bytes of Python's code that are compiled in a second
_CHECK = hashlib.sha256().digest_size  # bytes at the start of a file that say whether the others are whole
_FREE = "NRT_MemInfo_call_dtor"  # frees an array that numba has allocated: named in machine code, and never called
_COMPILED: list[Compiled] = []
_loaded: list[Any] = []  # what owns the machine code
_said = False  # that something is compiled


def compiled(function: Callable[..., Any]) -> Compiled:
    """Compile a function when it is first called, and keep the machine code on disk if a folder is writable.

    It releases the global interpreter lock: training goes on while another thread plans.
    """
    return Compiled(function)


class Compiled:
    """A function that runs as machine code, one for each combination of its arguments' types; it returns a number.

    Called from another compiled function it is a part of that.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        assert isinstance(function, FunctionType)
        self.function = function
        self._natives: dict[tuple[str, ...], Callable[..., int] | None] = {}  # None where numba has to call it
        _COMPILED.append(self)

    def __call__(self, *arguments: Any) -> Any:
        types: list[str] = []
        words: list[Any] = []
        _flatten(arguments, types, words)
        key = tuple(types)
        if key not in self._natives:
            try:
                self._natives[key] = self._native(key, arguments)
            except Exception as error:  # numba or llvmlite are not as they were: planning takes longer, and is possible
                print(f"the planner's machine code cannot be kept ({error}): every process compiles it", file=sys.stderr)
                self._natives[key] = None
        native = self._natives[key]
        if native is None:
            return self.jitted(*arguments)
        result = ctypes.c_double()
        failed = native(ctypes.byref(result), ctypes.byref(ctypes.c_void_p()), *words)
        assert not failed, f"{self.function.__name__} raised"
        return result.value

    @cached_property
    def jitted(self) -> Any:
        """For numba, with what it calls."""
        from numba import njit

        function = self.function
        known = {name: each.jitted if isinstance(each, Compiled) else each for name, each in _named(function).items()}
        copy = FunctionType(function.__code__, known, function.__name__, function.__defaults__)
        return njit(error_model="numpy", forceinline=True, nogil=True)(copy)

    def _native(self, types: tuple[str, ...], arguments: tuple[Any, ...]) -> Callable[..., int]:
        fields = [getattr(type(each), "_fields", ()) for each in arguments if isinstance(each, tuple)]
        parts = (*_identity(self.function), types, fields, *_machine())
        name = f"{self.function.__name__}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:20]}"
        code = _kept(name)
        if code is None:
            with _alone() as folder:  # another process may have compiled it meanwhile
                code = _kept(name)
                if code is None:
                    _say(folder)
                    code = self._compile(name, types, arguments)
                    _keep(folder, name, code)
        words = (word for each in types for word in _words_of(each))
        return ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *words)(_load(name, code))

    def _compile(self, name: str, types: tuple[str, ...], arguments: tuple[Any, ...]) -> bytes:
        """An object file with one function of this name, whose parameters are those of ``_flatten``."""
        import llvmlite.binding as llvm
        import numba

        known, parameters, kinds = {"function": self.jitted, "carray": numba.carray}, list[str](), list[Any]()
        left = iter(types)

        def text(argument: Any) -> str:
            if isinstance(argument, tuple):
                known[type(argument).__name__] = type(argument)
                return f"{type(argument).__name__}({', '.join(map(text, argument))})"
            kind, first = next(left), len(parameters)
            parameters.extend(f"a{first + number}" for number in range(len(_words_of(kind))))
            if kind in _SCALARS:
                kinds.append(numba.float64 if kind == "float" else numba.int64)
                return f"a{first} != 0" if kind == "bool" else f"a{first}"
            kinds.append(numba.types.CPointer(numba.from_dtype(np.dtype(kind[0]))))
            kinds.extend([numba.int64] * int(kind[1:]))
            return f"carray(a{first}, ({''.join(f'{each}, ' for each in parameters[first + 1 :])}))"

        call = f"function({', '.join(map(text, arguments))})"
        exec(f"def native({', '.join(parameters)}):\n    return 0.0 + {call}", known)
        options: dict[str, Any] = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        made = numba.njit(numba.float64(*kinds), **options)(known["native"])
        module = llvm.parse_assembly(made.inspect_llvm(made.signatures[0]))
        outside = {each.name for each in module.functions if each.is_declaration} - {_FREE}
        unknown = [each for each in outside if each.startswith(("NRT_", "numba_", "Py"))]
        assert not unknown, f"{self.function.__name__} allocates or raises: it calls {', '.join(unknown)}"
        [whole] = (each for each in module.functions if not each.is_declaration and each.linkage == llvm.Linkage.external)
        whole.name = name
        return bytes(_target().emit_object(module))


def _flatten(arguments: Any, types: list[str], words: list[Any]) -> None:
    """Append the types of arrays and numbers, and what stands for them: of arrays the address and the shape."""
    for each in arguments:
        if isinstance(each, np.ndarray):
            assert each.flags.c_contiguous
            types.append(f"{each.dtype.char}{each.ndim}")
            words.append(each.__array_interface__["data"][0])
            words.extend(each.shape)
        elif isinstance(each, tuple):
            _flatten(each, types, words)
        else:
            types.append("bool" if isinstance(each, bool | np.bool_) else "float" if isinstance(each, float) else "int")
            words.append(each)


def _words_of(kind: str) -> list[Any]:
    """The C types of what stands for an argument of a type."""
    return [_SCALARS[kind]] if kind in _SCALARS else [ctypes.c_void_p] + [ctypes.c_int64] * int(kind[1:])


def _named(function: FunctionType) -> dict[str, Any]:
    """Values of the names of other things in a function."""
    return {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}


def _identity(function: FunctionType) -> Iterator[object]:
    """Identity of a function: its code, the constants that it names, and the same of every function that it calls."""
    code = function.__code__
    yield code.co_code
    yield code.co_names
    yield [each for each in code.co_consts if not isinstance(each, CodeType)]
    for name, value in _named(function).items():
        if isinstance(value, Compiled):
            yield from _identity(value.function)
        elif isinstance(value, bool | int | float):
            yield name, value


def _folders() -> list[Path]:
    """Folders for machine code, the first place first: numba's cache folder, or else beside Python's code, or in the user's."""
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(given)]
    home = user_folder()
    return [Path(__file__).parent / "__pycache__", *([home] if home else [])]


def user_folder() -> Path | None:
    """The user's folder for what can be made again; None where the user has no home."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "megatron-pipeline" if os.path.isabs(home) else None


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that other processes, which may write it, too, see whole or not at all; its folder is made if need be.

    Raises:
        OSError: it cannot be written; no part of it stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.urandom(8).hex()}.part")  # nodes that share the folder may have equal process ids
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)  # such as half of it on a full disk


def _kept(name: str) -> bytes | None:
    """The machine code of a name, if there is some and all of it."""
    for folder in _folders():
        with contextlib.suppress(OSError):
            found = (folder / f"{name}.o").read_bytes()
            if hashlib.sha256(found[_CHECK:]).digest() == found[:_CHECK]:
                return found[_CHECK:]
    return None


def _keep(folder: Path | None, name: str, code: bytes) -> None:
    if folder is not None:
        with contextlib.suppress(OSError):  # the next process compiles again
            write_whole(folder / f"{name}.o", hashlib.sha256(code).digest() + code)


@contextlib.contextmanager
def _alone() -> Iterator[Path | None]:
    """A folder for machine code, None if none is writable; no other process has it, unless files cannot be locked there.

    The system gives a lock back when its holder dies.
    """
    with contextlib.ExitStack() as stack:
        for folder in _folders():
            lock: IO[str] | None = None
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(open(folder / "compiling.lock", "a", encoding="utf-8"))
            if lock:
                with contextlib.suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_EX)
                yield folder
                return
        yield None


def _say(folder: Path | None) -> None:
    global _said
    if not _said:
        _said = True
        seconds = sum(len(each.function.__code__.co_code) for each in _COMPILED) / _PER_SECOND
        once = "once" if folder else "in every process, for no cache folder is writable; set NUMBA_CACHE_DIR to one that is"
        print(f"compiling the planner, {once}: about {seconds:.0f} s", file=sys.stderr, flush=True)


@cache
def _machine() -> tuple[object, ...]:
    """Facts that machine code depends on: the processor's name, what it can do, and the versions of what compiles, numba not
    loaded.
    """
    import llvmlite
    import llvmlite.binding as llvm

    numba = find_spec("numba")
    assert numba is not None and numba.origin is not None, "it is installed with this package"
    versions = llvmlite.__version__, Path(numba.origin).with_name("_version.py").read_bytes()
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), versions


@cache
def _target() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = _machine()[:2]
    return llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=3, jit=True)


def _load(name: str, code: bytes) -> int:
    """The address of the function in an object file; it stays there."""
    import llvmlite.binding as llvm

    llvm.add_symbol(_FREE, ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _loaded.append(engine)
    address: int = engine.get_function_address(name)
    return address
