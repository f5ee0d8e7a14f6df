"""Stand-ins for native packages that SGLang imports on a CPU but never calls for text models."""

import importlib.abc
import importlib.machinery
import types


class _Dummy(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return make(f"{cls.__name__}.{name}")

    def __call__(cls, *args, **kwargs):
        # used as a decorator, hand the function back
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        raise RuntimeError(f"stub of {cls.__name__} was called")


def make(name):
    return _Dummy(name, (), {})


class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = make(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots):
        # name of the package -> what puts real things into it, or None
        self.roots = roots

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = Module(spec.name)
        module.__path__ = []
        module.__version__ = "0.0.0"
        return module

    def exec_module(self, module):
        fill = self.roots.get(module.__name__)
        if fill is not None:
            fill(module)
